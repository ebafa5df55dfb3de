"""`hotset simulate` as a person and as a script uses it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hotset.trace.synth import SynthConfig, synthesise

FIELDS = {
    "trace", "policy", "scope", "streams", "budget_slots", "budget_fraction", "phase", "start", "hit_rate",
    "misses_per_token", "bytes_per_token", "gap_closed", "evictions",
}  # fmt: skip


def hotset(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hotset", *map(str, words)], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "chat.safetensors"
    config = SynthConfig(
        layers=4, experts=16, top_k=2, requests=6, prompt_tokens=8, new_tokens=24, expert_bytes=1 << 20
    )
    synthesise(config).save(path)
    return path


def test_json_is_one_document_with_the_promised_fields(trace: Path) -> None:
    done = hotset("simulate", trace, "-p", "lru", "-p", "blend", "-b", "25%", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rows = json.loads(done.stdout)["rows"]
    assert all(row.keys() >= FIELDS for row in rows)
    assert {row["policy"] for row in rows} == {"lru", "blend", "belady"}
    assert {(row["phase"], row["start"]) for row in rows} == {
        ("decode", "cold"), ("prefill", "cold"), ("decode", "warm"), ("prefill", "warm")
    }  # fmt: skip
    for row in rows:
        assert 0 <= row["hit_rate"] <= 1
        assert row["budget_slots"] == 16
        assert row["budget_fraction"] == 0.25
        assert row["bytes_per_token"] == pytest.approx(row["misses_per_token"] * (1 << 20))


def test_the_table_names_every_policy_and_the_bound(trace: Path) -> None:
    done = hotset("simulate", trace, "-b", "25%")
    assert done.returncode == 0, done.stderr
    for word in ("lru", "lfu", "lfru", "slru", "window", "decay", "layered", "static", "blend", "belady"):
        assert word in done.stdout
    assert "static needs counts" in done.stderr


def test_only_what_was_asked_for_and_the_bound(trace: Path) -> None:
    rows = json.loads(hotset("simulate", trace, "-p", "lfu", "-b", "25%", "--fit", "0", "--json").stdout)["rows"]
    assert {row["policy"] for row in rows} == {"lfu", "belady"}
    assert {row["start"] for row in rows} == {"cold"}
    assert all(row["gap_closed"] is not None for row in rows if row["phase"] == "decode")


def test_plot_and_csv_are_written(trace: Path, tmp_path: Path) -> None:
    done = hotset(
        "simulate",
        trace,
        "-p",
        "lru",
        "-b",
        "25%",
        "-b",
        "50%",
        "--plot",
        tmp_path / "p.svg",
        "--csv",
        tmp_path / "r.csv",
    )
    assert done.returncode == 0, done.stderr
    assert "<svg" in (tmp_path / "p.svg").read_text()
    assert (tmp_path / "r.csv").read_text().startswith("trace,policy,")


def test_link_adds_time(trace: Path) -> None:
    rows = json.loads(
        hotset("simulate", trace, "-p", "lru", "-b", "25%", "--link", "25GB/s", "--compute", "4ms", "--json").stdout
    )["rows"]
    assert all(row["time_s_per_token"] > row["stall_s_per_token"] >= 0 for row in rows)


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["-p", "nope"], "there are belady, blend"),
        (["-p", "lru:speed=9"], "it has admit"),
        (["-p", "decay:half_life=x"], "must be a number"),
        (["-b", "1 slots"], "the smallest that works is 2 slots"),
        (["-b", "huge"], "write a size"),
        (["--scope", "galaxy"], "layer, pool"),
        (["--mode", "sideways"], "batch, turns"),
        (["--prefill", "never"], "free, always, score"),
        (["--link", "25GB/s"], "--compute"),
        (["--link", "fast", "--compute", "4ms"], "25GB/s"),
        (["--plot", "p.bmp"], ".png"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(trace: Path, words: list[str], remedy: str) -> None:
    done = hotset("simulate", trace, *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert remedy in done.stderr


def test_a_damaged_file_is_one_line_and_exit_2(trace: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(trace.read_bytes()[:-100])
    done = hotset("simulate", broken)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_version_and_help() -> None:
    assert hotset("--version").stdout.startswith("hotset ")
    assert json.loads(hotset("version", "--json").stdout)["version"]
    contents = hotset("--help").stdout
    assert "simulate" in contents
    assert "trace" in contents
