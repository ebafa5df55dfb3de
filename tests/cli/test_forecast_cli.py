"""`hotset forecast` as a person and as a script uses it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from calls import call

from hotset.trace.synth import SynthConfig, synthesise

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace without predictions and token ids."""
    path = tmp_path_factory.mktemp("traces") / "bare.safetensors"
    synthesise(SynthConfig(layers=4, experts=16, top_k=2, requests=6, prompt_tokens=8, new_tokens=24)).save(path)
    return path


def test_json_is_one_document() -> None:
    done = call("forecast", "reference:it", "-f", "gate", "-f", "previous", "-d", "1,3", "--json")
    assert done.code == 0, done.err
    assert done.err == ""
    result = json.loads(done.out)["traces"]["it"]
    assert "requests 14 to 26" in result["judged"]
    assert {(score["forecast"], score["distance"]) for score in result["scores"]} == {
        ("gate", 1), ("gate", 3), ("previous", 1), ("previous", 3)
    }  # fmt: skip
    for score in result["scores"]:
        assert 0 < score["recall"] <= score["recall_2k"] <= 1
        assert score["us_per_event"] > 0
        assert len(score["bins"]) == 10


def test_the_table_says_what_was_judged_and_what_is_left_out(bare: Path) -> None:
    done = call("forecast", bare, "--by-layer")
    assert done.code == 0, done.err
    for word in ("best", "previous", "transition", "requests 4 to 6", "recall @k by layer", "1 layer", "3 layers"):
        assert word in done.out
    assert "gate is left out: the trace has no predictions: record it with --record-lookahead 3" in done.err
    assert "token is left out: the trace has no token ids: hotset trace record keeps them" in done.err
    assert "forecasting" not in done.err  # no bar in a pipe


def test_where_nothing_can_be_judged_it_says_what_to_record(bare: Path, tmp_path: Path) -> None:
    done = call("forecast", bare, "-f", "gate", "--csv", tmp_path / "f.csv")
    assert done.code == 2
    assert done.error == (
        "no forecast is left: gate cannot be judged, the trace has no predictions: record it with --record-lookahead 3"
    )
    assert not (tmp_path / "f.csv").exists()


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plots(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"ahead.{suffix}"
    done = call("forecast", "reference:it", "reference:de", "-f", "gate", "-f", "token", "-f", "token:slots=64",
                  "--plot", path)  # fmt: skip
    assert done.code == 0, done.err
    assert path.stat().st_size > 10_000
    if suffix == "svg":
        text = path.read_text(encoding="utf-8")
        assert "reliability of gate" in text
        assert "token:slots=64" in text


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("-f", "nonsense"), 'no forecast is called "nonsense"'),
        (("-d", "one"), 'cannot read the distances "one"'),
        (("-d", "9"), "a distance in layers must be a whole number from 1 to 3"),
        (("--plot", "x.gif"), ".png"),
    ],
)
def test_faults_are_one_line(bare: Path, words: tuple[str, ...], fault: str) -> None:
    done = call("forecast", bare, *words)
    assert done.code == 2
    assert fault in done.err
    assert done.err.count("\n") == 1


def test_rows_as_csv(tmp_path: Path, bare: Path) -> None:
    table = tmp_path / "scores.csv"
    done = call("forecast", bare, "-f", "previous", "-d", "1,2", "--csv", table, "--json")
    assert done.code == 0, done.err
    rows = list(csv.DictReader(table.read_text().splitlines()))
    scores = json.loads(done.out)["traces"]["bare"]["scores"]
    assert [float(row["recall"]) for row in rows] == [score["recall"] for score in scores]
    assert "there is no folder" in call("forecast", bare, "--csv", tmp_path / "none" / "a.csv").error


def test_a_file_that_is_no_forecast(tmp_path: Path, bare: Path) -> None:
    (tmp_path / "own.py").write_text("FORECAST = 3")
    assert "does not define FORECAST" in call("forecast", bare, "-f", tmp_path / "own.py").error
