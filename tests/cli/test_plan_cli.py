"""`hotset plan` and `hotset doctor --measure` as people call them."""

from __future__ import annotations

import csv
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from calls import call

from hotset import reference
from hotset.analysis.planner import calibration
from hotset.analysis.planner.calibration import Calibration, CpuFigures
from hotset.analysis.planner.hits import replay_hits
from hotset.analysis.planner.model import SPECS
from hotset.analysis.planner.rates import ExpertPoint
from hotset.analysis.planner.workload import like
from hotset.cli.app import app
from hotset.options import RunOptions
from hotset.trace.synth import SynthConfig, synthesise

pytestmark = pytest.mark.filterwarnings("default")

SHAPE = ("--shape", "layers=4,experts=16,top_k=2,hidden=512,intermediate=512,vocab=1000")
ELSEWHERE = (*SHAPE, "--ram", "1200MiB", "--memory-bandwidth", "50GB/s", "--disk", "2GB/s")
GPU = (*SHAPE, "--gpu", "1GiB", "--ram", "2GiB", "--memory-bandwidth", "1TB/s", "--link", "25GB/s", "--disk", "2GB/s")
MATRICES = ((64, 256), (256, 32))
POINTS = [ExpertPoint(name, MATRICES, 49152, 1e-5, 1e-4) for name in SPECS]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))


def document(*words: str | Path) -> Any:
    done = call("plan", *words, "--json")
    assert done.code == 0, done
    return json.loads(done.out)


@pytest.fixture
def measured() -> Calibration:
    """A kept calibration of this machine, with round figures."""
    cpu = CpuFigures(
        memory_bytes_per_s=2e10, layer_s=1e-3, event_s=2e-4, partial_s=1e-4, miss_s=2e-4, read_s=1e-4,
        disk_bytes_per_s=2e9, busy=0.9, kept=0.6, threads=2,
    )  # fmt: skip
    found = Calibration(calibration.machine_name(), "2026-11-17", cpu, POINTS)
    hits = replay_hits(like("it", reference.trace("it").shape).trace, ("lru",))
    found = found.with_curve(hits.curves["lru"])
    calibration.save(found)
    return found


@pytest.mark.parametrize("words", [ELSEWHERE, GPU])
def test_a_table_and_its_document(words: tuple[str, ...]) -> None:
    found = document(*words)
    assert [row["precision"] for row in found["rows"]] == ["bfloat16", "int8", "int4", "mxfp4"]
    given = found["gpu_bytes"] or found["ram_bytes"]
    for row in found["rows"]:
        assert row["low_tokens_per_s"] < row["tokens_per_s"] < row["high_tokens_per_s"]
        assert row["rest_bytes"] + row["fast_bytes"] + row["unused_bytes"] == given
        assert row["tokens_per_s"] <= row["bound_tokens_per_s"] * 1.001
        assert row["prompt_s"] > 0
    table = call("plan", *words).out
    assert "tokens/s" in table
    assert "+8.00 GiB" in table
    assert "hotset pack" in table


@pytest.mark.parametrize("words", [ELSEWHERE, GPU, (*ELSEWHERE, "--context", "512"), (*GPU, "--target", "50tok/s")])
def test_every_command_is_one_that_hotset_takes(words: tuple[str, ...]) -> None:
    found = document(*words)
    lines = [line for row in (*found["rows"], *found["targets"]) for line in row["commands"]]
    assert any(line.startswith("hotset pack") for line in lines)
    commands: Any = typer.main.get_command(app)
    for line in lines:
        program, name, *rest = shlex.split(line)
        assert program == "hotset"
        parsed = commands.commands[name].make_context(name, rest).params
        if name == "run":
            RunOptions(
                **{key: parsed[key] for key in ("memory", "host_memory", "device", "policy", "experts", "context")}
            )
            assert parsed["prompt"]


@pytest.mark.parametrize("shape", ["layers=1,experts=1,top_k=1", "layers=4,experts=1,top_k=1",
                                   "layers=1,experts=2,top_k=2"])  # fmt: skip
@pytest.mark.parametrize("more", [(), ("--target", "1tok/s"), ("--gpu", "4GiB")])
def test_models_of_which_nothing_can_be_left_out(shape: str, more: tuple[str, ...]) -> None:
    machine = ("--ram", "4GiB", "--memory-bandwidth", "50GB/s", "--disk", "2GB/s")
    found = document("--shape", f"{shape},hidden=64,intermediate=64", *machine, *more)
    assert all(row["resident"] == 1 for row in found["rows"] or found["targets"])
    assert {row["reached"] for row in found["targets"]} <= {True}


@pytest.mark.parametrize(
    ("machine", "needed"),
    [
        (("--ram", "10MiB"), "MiB of RAM, with"),
        (("--gpu", "10MiB", "--ram", "64GiB"), "MiB of GPU memory, with"),
        (("--gpu", "1GiB", "--ram", "1MiB"), "MiB of RAM behind the GPU, with"),
    ],
)
def test_what_does_not_fit_is_known_before_anything_is_replayed(
    machine: tuple[str, ...], needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotset.cli.plan_sources.replayed", lambda *_: pytest.fail("replayed"))
    large = ("--shape", "layers=32,experts=64,top_k=2,hidden=512,intermediate=512,vocab=1000")
    assert needed in call("plan", *large, *machine, "--memory-bandwidth", "50GB/s").error


def test_a_trace_in_which_no_answer_used_an_expert(tmp_path: Path) -> None:
    trace = synthesise(SynthConfig(layers=4, experts=16, top_k=2, requests=6, prompt_tokens=2, new_tokens=3))
    replace(trace, experts=np.full_like(trace.experts, -1), weights=None).save(tmp_path / "none.safetensors")
    assert "no answer in the trace used" in call("plan", *ELSEWHERE, "--trace", tmp_path / "none.safetensors").error


def test_very_slow_machines_have_figures() -> None:
    slow = ("--memory-bandwidth", "1MB/s", "--disk", "1MB/s")
    lines = call("plan", *SHAPE, "--ram", "2GiB", *slow).out.splitlines()
    (row,) = (line for line in lines if "bfloat16 " in line)
    assert re.search(r"0\.\d*[1-9] \(0\.\d*[1-9] to 0\.\d*[1-9]\)", row), row


def test_files_are_written(tmp_path: Path) -> None:
    done = call("plan", *GPU, "--plot", tmp_path / "p.svg", "--csv", tmp_path / "p.csv")
    assert done.code == 0, done
    assert "tokens per second" in (tmp_path / "p.svg").read_text()
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert [row["precision"] for row in rows] == ["bfloat16", "int8", "int4", "mxfp4"]
    assert rows[2]["commands"].startswith("hotset pack")


def test_targets(tmp_path: Path) -> None:
    found = document(*GPU, "--target", "50tok/s")
    assert found["rows"] == []
    assert all(row["reached"] and row["tokens_per_s"] >= 50 for row in found["targets"])
    again = document(*SHAPE, "--gpu", str(found["targets"][0]["memory_bytes"]), *GPU[4:])
    assert again["rows"][0]["tokens_per_s"] == pytest.approx(found["targets"][0]["tokens_per_s"])
    done = call("plan", *GPU, "--target", "90000tok/s", "--csv", tmp_path / "t.csv")
    assert "memory_bytes" in (tmp_path / "t.csv").read_text().splitlines()[0]
    assert done.code == 0
    assert "note: no precision reaches 90000 tokens per second" in done.err
    assert "the bound is" in done.err


def test_the_model_that_ships_by_a_kept_calibration(measured: Calibration) -> None:
    done = call("plan", "--ram", "600MiB", "--like", "it", "--json")
    assert done.code == 0, done
    assert "measured yet" not in done.err
    rows = json.loads(done.out)["rows"]
    assert rows[0]["engine"] == "cpu"
    assert rows[0]["commands"][0].startswith("hotset run --memory ")
    slower = json.loads(call("plan", "--ram", "600MiB", "--like", "it", "--disk", "10MB/s", "--json").out)["rows"]
    assert rows[0]["resident"] == slower[0]["resident"]
    assert rows[0]["tokens_per_s"] >= slower[0]["tokens_per_s"]
    assert measured.cpu.threads == 2


def test_experts_that_were_not_measured_are_said(measured: Calibration) -> None:
    said = "hotset doctor reference --measure measures them"
    assert not any(said in line for line in document("--ram", "600MiB", "--like", "it")["notes"])
    others = [point._replace(matrices=((128, 512), (512, 64))) for point in measured.experts]
    calibration.save(replace(measured, experts=others))
    assert any(said in line for line in document("--ram", "600MiB", "--like", "it")["notes"])


def test_memory_auto_says_what_was_chosen(measured: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    total = reference.trace("it").shape.total_experts * 49152
    monkeypatch.setattr("hotset.models.account.Account.expert_bytes", property(lambda _: total // 3))
    done = call("run", "-p", "Il mercato", "--max-new-tokens", "3", "--json")
    assert done.code == 0, done
    json.loads(done.out)
    (line,) = [line for line in done.err.splitlines() if "auto" in line]
    assert "% resident: all that is free beside the rest of the model" in line
    assert "experts auto: bfloat16, as the checkpoint has them" in line
    assert "tokens per second; another 2.00 GiB would bring" in line
    calibration.path().unlink()
    done = call("run", "-p", "Il mercato", "--max-new-tokens", "3")
    (line,) = [line for line in done.err.splitlines() if "auto" in line]
    assert re.search(
        r"packed as int4 \(lossy\) \d\d % would be resident: hotset pack MODEL -o OUT --experts int4", line
    )
    assert line.endswith("hotset doctor MODEL --measure, once, would let this line say what to expect")
    assert "auto" not in call("run", "-p", "Il", "--max-new-tokens", "2", "--memory", "25%").err
    assert measured.gpu is None


def test_the_best_other_precision_is_named_and_not_chosen(
    measured: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = reference.trace("it").shape.total_experts * 49152
    monkeypatch.setattr("hotset.models.account.Account.expert_bytes", property(lambda _: total // 2))
    points = [each._replace(one_s=each.one_s / (9 if each.precision == "int4" else 1)) for each in POINTS]
    calibration.save(replace(measured, experts=points))
    done = call("run", "-p", "Il mercato", "--max-new-tokens", "3", "--json")
    assert "packed as int4 (lossy) it would all fit: hotset pack MODEL -o OUT --experts int4, about" in done.err
    assert json.loads(done.out)["stats"]["slots"] < 512


def test_where_all_fits_one_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("Il mercato\n")
    commands = (
        ("run", "-p", "Il", "--max-new-tokens", "2"),
        ("analyze", "--prompts", tmp_path / "p.txt", "--max-new-tokens", "2"),
        ("analyze", "--prompts", tmp_path / "p.txt", "--max-new-tokens", "2", "--no-saliency"),
    )
    for words in commands:
        told = call(*words).err.splitlines()
        (line,) = [line for line in told if "fit" in line or "auto" in line]
        assert "memory auto: all 512 experts fit (24.0 MiB); experts auto: bfloat16, as the checkpoint" in line
        assert ("as transformers made it" in line) == (words is not commands[1])


def test_doctor_measures_and_keeps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from hotset.analysis.planner import measure_experts, measure_reads, measuring
    from hotset.cli import doctor_machine

    monkeypatch.setattr(measure_experts, "POOL_BYTES", 1 << 20)
    monkeypatch.setattr(measure_reads, "SAMPLE_BYTES", 16 << 20)
    monkeypatch.setattr(measure_reads, "_BESIDE", ("bfloat16", MATRICES))
    monkeypatch.setattr(measuring, "SHAPES", ())
    monkeypatch.setattr(measuring, "SPECS", {"bfloat16": "dense"})
    monkeypatch.setattr(measuring, "THOROUGH", measuring.Effort(0.01, 2))
    monkeypatch.setattr(measuring, "QUICK", measuring.Effort(0.01, 2))
    monkeypatch.setattr(doctor_machine, "SECONDS_EACH", 0.01)
    first = call("plan", "--like", "it", "--ram", "1GiB")
    assert "note: this machine was not measured yet" in first.err
    assert calibration.load() is None
    monkeypatch.setattr("hotset.cli.doctor_measure.BUSY_CORES", -9.0)
    done = call("doctor", reference.path(), "--measure")
    assert "measure again when they are done" in done.err
    assert done.code == 0, done
    assert "Measured" in done.out
    kept = calibration.load()
    assert kept is not None
    assert kept.curve(reference.trace("it").shape) is not None
    assert {point.matrices for point in kept.experts} == {MATRICES}
    assert str(tmp_path / "xdg") in done.out.replace("\n", "")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ((*SHAPE, "--ram", "10MiB", "--memory-bandwidth", "50GB/s"), "does not fit in any precision: the least"),
        (("./here", *SHAPE), "exclude each other"),
        ((*ELSEWHERE, "--like", "it", "--trace", "reference:it"), "--trace and --like exclude each other"),
        ((*ELSEWHERE, "--like", "klingon"), '--like knows no "klingon"'),
        ((*ELSEWHERE, "--trace", "reference:it"), "give a trace of this model"),
        ((*ELSEWHERE, "--target", "fast"), 'cannot read the target "fast"'),
        ((*ELSEWHERE, "--more", "lots"), "cannot read the size"),
        ((*ELSEWHERE, "--link", "25GB/s"), "--link is between RAM and a GPU"),
        ((*ELSEWHERE, "--plot", "plan.bmp"), "must end in .png"),
        ((*SHAPE, "--ram", "10MiB", "--memory-bandwidth", "50GB/s"), "a model of this --shape does not fit"),
        ((*SHAPE, "--csv", "/nonexistent/x.csv"), "there is no folder /nonexistent"),
        (("--shape", "layers=4"), "--shape lacks experts"),
        (("./nowhere", "--ram", "1GiB", "--memory-bandwidth", "50GB/s"), "there is no folder ./nowhere"),
    ],
)
def test_impossible_input_is_one_line(words: tuple[str, ...], match: str) -> None:
    assert match in call("plan", *words).error


def test_a_gpu_that_is_not_here_has_assumed_rates(measured: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotset.cli.plan_sources.gpu_here", lambda: None)
    done = call("plan", *SHAPE, "--gpu", "8GiB", "--ram", "8GiB", "--json")
    found = json.loads(done.out)
    assert [line.split()[0] for line in found["notes"][:2]] == ["--memory-bandwidth", "--link"]
    assert not any("--disk" in line for line in found["notes"])  # that of this machine is measured
    assert found["rates"] == "assumed in part"
    told = ("--memory-bandwidth", "500GB/s", "--link", "25GB/s", "--disk", "2GB/s")
    sure = document(*SHAPE, "--gpu", "8GiB", "--ram", "8GiB", *told)["rows"][0]
    guess = found["rows"][0]
    assert guess["tokens_per_s"] == sure["tokens_per_s"]
    assert guess["high_tokens_per_s"] > 1.1 * sure["high_tokens_per_s"]
    assert measured.gpu is None


def test_the_form_of_the_documents_needs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotset.cli.plan_sources.gpu_here", lambda: None)
    done = call("plan", *SHAPE, "--gpu", "1GiB", "--ram", "2GiB", "--like", "it", "--link", "25GB/s", "--disk", "3GB/s")
    assert done.code == 0, done
    assert "500 GB/s is assumed" in done.err
    assert "a model of this --shape" in done.out


def test_engines_are_told_by_precision_where_they_differ() -> None:
    mixed = ("--shape", "layers=8,experts=64,top_k=4,hidden=1024,intermediate=768,vocab=1000", "--gpu", "1GiB", "--ram",
             "2GiB", "--memory-bandwidth", "1TB/s", "--link", "25GB/s", "--disk", "2GB/s")  # fmt: skip
    rows = document(*mixed)["rows"]
    assert {row["engine"] for row in rows} == {"device", "host"}
    names = [row["precision"] for row in rows if row["engine"] == "device"]
    assert f"the GPU drives itself ({', '.join(names)})" in " ".join(call("plan", *mixed).out.split())
    assert "the CPU computes; rates" in " ".join(call("plan", *ELSEWHERE).out.split())


def test_doctor_says_what_to_expect_of_a_model(measured: Calibration) -> None:
    model = reference.path()
    found = json.loads(call("doctor", model, "--json").out)["model"]
    speed = found["tokens_per_s"]
    # All experts fit: a token takes the rest of each layer and eight products of 10 us.
    assert found["fits"]
    assert 0 < speed["low"] < speed["expected"] < speed["high"] < 1 / (8 * measured.cpu.layer_s)
    told = call("doctor", model)
    assert f"{speed['low']:.3g} to {speed['high']:.3g} tokens per second with --memory auto" in " ".join(
        told.out.split()
    )


def test_doctor_says_how_to_have_that_measured() -> None:
    told = call("doctor", reference.path())
    assert "hotset doctor MODEL --measure measures this machine" in " ".join(told.out.split())
