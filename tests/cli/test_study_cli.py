"""`hotset study` as a person and as a script uses it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from calls import call

from hotset.trace.synth import SynthConfig, synthesise

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    """Two tasks of one model, as options."""
    folder = tmp_path_factory.mktemp("traces")
    words: list[str | Path] = []
    for seed in (1, 2):
        path = folder / f"task{seed}.safetensors"
        config = SynthConfig(layers=4, experts=16, top_k=2, requests=6, prompt_tokens=4, new_tokens=12, seed=seed)
        synthesise(config).save(path)
        words += ["--trace", path]
    return words


def test_json_is_one_document(pair: list[str | Path]) -> None:
    done = call("study", "shift", *pair, "--json")
    assert done.code == 0, done.err
    assert done.err == ""
    document = json.loads(done.out)
    assert document["study"] == "shift"
    assert {row["by"] for row in document["rows"]} >= {"lru", "lfu", "blend", "eam"}
    assert all(column["key"] in row for row in document["rows"] for column in document["columns"])


def test_table_plot_and_result_agree(pair: list[str | Path], tmp_path: Path) -> None:
    out, plot = tmp_path / "result.json", tmp_path / "study.png"
    done = call("study", "bytes", *pair, "--out", out, "--plot", plot)
    assert done.code == 0, done.err
    assert plot.stat().st_size > 10_000
    document = json.loads(out.read_text())
    assert document["machine"]["cores"] >= 1
    assert document["date"]
    for word in (
        "Prefetch at equal bytes",
        "2 workloads mixed (task1, task2)",
        "demand only",
        "oracle",
        "split:",
    ):
        assert word in done.out
    assert f"{document['rows'][0]['tokens_per_s']:,.1f}" in done.out
    for text in document["notes"]:
        assert text in done.err


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (
            ("nonsense",),
            'no study is called "nonsense"; there are bytes, capacity, policies, sensitivity, shift, users',
        ),
        (("bytes", "--plot", "x.gif"), ".png"),
        (("bytes", "--trace", "nowhere.safetensors"), "nowhere.safetensors"),
        (("bytes", "--trace", "reference:nothing"), 'no workload is called "nothing"'),
        (("shift", "--trace", "reference:it"), "at least two traces"),
    ],
)
def test_faults_are_one_line(words: tuple[str, ...], fault: str) -> None:
    done = call("study", *words)
    assert done.code == 2
    assert fault in done.err
    assert done.err.count("\n") == 1


def test_rows_as_csv(pair: list[str | Path], tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    done = call("study", "shift", *pair, "--csv", table, "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    keys = [column["key"] for column in document["columns"]]
    assert list(rows[0])[: len(keys)] == keys
    assert [row["by"] for row in rows] == [row["by"] for row in document["rows"]]
    assert "there is no folder" in call("study", "shift", *pair, "--csv", tmp_path / "none" / "a.csv").error
