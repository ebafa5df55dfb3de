"""`hotset doctor`: it tells what it can, and never fails for what it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hotset import load, reference
from hotset.cli import doctor_machine
from hotset.cli.app import app
from hotset.cli.doctor import choices
from hotset.errors import HotsetError

pytestmark = pytest.mark.filterwarnings("default")


def call(*words: str | Path) -> Any:
    done = CliRunner().invoke(app, ["doctor", *map(str, words)])
    if isinstance(done.exception, HotsetError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture(autouse=True)
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "SAMPLE_BYTES", 16 << 20)
    monkeypatch.setattr(doctor_machine, "SECONDS_EACH", 0.01)


def test_json_tells_the_machine_and_the_choices(tmp_path: Path) -> None:
    report = json.loads(call("--path", tmp_path, "--json").stdout)
    assert {row["name"] for row in report["software"]} >= {"python", "torch", "transformers", "numba", "triton"}
    assert all(row["supported"] for row in report["software"] if row["name"] in ("python", "torch", "transformers"))
    assert report["memory"]["total_bytes"] >= report["memory"]["available_bytes"] > 0
    assert [row["what"] for row in report["choices"]][:4] == ["engine", "reader threads", "direct I/O", "memory auto"]
    assert [row["what"] for row in report["choices"]][4:] == (["driven by"] if report["gpus"] else [])
    assert all(row["value"] and row["why"] for row in report["choices"])
    assert len(report["disk"]["reads"]) == 6
    assert all(read["bytes_per_s"] > 0 for read in report["disk"]["reads"])
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_measured_without_loading_it(tmp_path: Path) -> None:
    report = json.loads(call(reference.path(), "--json").stdout)
    model = report["model"]
    assert (model["layers"], model["experts"], model["top_k"]) == (8, 64, 8)
    assert model["all_experts_bytes"] == 512 * model["expert_bytes"]
    assert model["fits"]
    assert report["disk"]["measured_on"].endswith(".safetensors")


def test_the_smallest_budget_works_and_less_does_not() -> None:
    least = json.loads(call(reference.path(), "--json").stdout)["model"]["least_bytes"]
    load(str(reference.path()), memory=str(least)).hotset.close()
    with pytest.raises(HotsetError, match="smallest"):
        load(str(reference.path()), memory=str(least - 1))


def test_people_see_lines(tmp_path: Path) -> None:
    text = call("--path", tmp_path).stdout
    for words in ("This machine", "hotset will use", "reader threads", "reads of 8.00 MiB"):
        assert words in text


def test_a_probe_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: Any) -> Any:
        raise OSError("no such thing here")

    for name in ("software", "processor", "memory", "gpus", "pinnable_bytes"):
        monkeypatch.setattr(doctor_machine, name, broken)
    monkeypatch.setattr(doctor_machine, "speeds", broken)
    report = json.loads(call("--path", tmp_path, "--json").stdout)
    assert report["memory"] == report["disk"] == {"unknown": "no such thing here"}
    assert call("--path", tmp_path).stdout.count("unknown: no such thing here") >= 6


def test_a_model_that_cannot_run_is_a_finding_and_none_at_all_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    report = json.loads(call(tmp_path, "--path", tmp_path, "--json").stdout)
    assert "cannot load the model" in report["model"]["unknown"]
    with pytest.raises(HotsetError, match="there is no folder"):
        call("/no/such/folder")
    with pytest.raises(HotsetError, match="there is no folder"):
        call("--path", "/no/such/folder")


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("5.17.0", ">=5.17,<6", True), ("5.16.9", ">=5.17,<6", False), ("6.0.0", "<6,>=5.17", False),
        ("2.13.0+cpu", ">=2.11", True), ("3.14.0", "<3.14,>=3.11", False), ("6.0.0.dev0", "<6,>=5.17", False),
    ],
)  # fmt: skip
def test_versions(version: str, wanted: str, fits: bool) -> None:
    assert doctor_machine.fits(version, wanted) is fits


@pytest.mark.parametrize(
    ("triton", "model", "value", "why"),
    [
        (False, {}, "the host", "Triton is missing"),
        (True, None, "the device if it can", "name a model"),
        (True, {"model": "x", "unknown": "no weights"}, "the device if it can", "name a model"),
        (True, {"fits": True}, "neither host nor device", "all experts fit"),
        (True, {"host_only": "its experts end in a norm"}, "the host", "end in a norm"),
        (True, {"all_experts_bytes": 900}, "the host", "holds 720 B of 900 B"),
        (True, {}, "the device", "holds all experts"),
    ],
)
def test_who_would_drive_a_gpu(
    monkeypatch: pytest.MonkeyPatch, triton: bool, model: dict[str, Any] | None, value: str, why: str
) -> None:
    monkeypatch.setattr("hotset.cli.doctor.find_spec", lambda _: object() if triton else None)
    known = {"fits": False, "host_only": None, "all_experts_bytes": 700, "expert_bytes": 10, "auto_bytes": 10}
    named = model if model is None or "unknown" in model else known | model
    gpus = [{"name": "a GPU"}]
    report = {"gpus": gpus, "disk": {}, "memory": {"available_bytes": 1000}, "model": named}
    row = choices(report)[-1]
    assert (row["what"], row["value"]) == ("driven by", value)
    assert why in row["why"]
