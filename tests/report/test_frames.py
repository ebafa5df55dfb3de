"""Traces and results as data frames, and as CSV; where pandas is missing, a line says what to install."""

import csv
import io
import sys

import pytest

import hotset
from hotset.errors import HotsetError
from hotset.report import to_pandas
from hotset.report.csv import forecasts_to_csv, study_to_csv
from hotset.sim import Sweep, simulate
from hotset.sim.forecasting import evaluate
from hotset.sim.studies import StudyResult, find
from hotset.trace.synth import SynthConfig, synthesise

STATS = {"policy": "lru", "decode": {"hit_rate": 0.5, "gain": {"points": 1}}, "pins": 0}


@pytest.fixture(scope="module")
def trace():
    return synthesise(SynthConfig(layers=3, experts=8, top_k=2, requests=3, prompt_tokens=3, new_tokens=6))


def test_a_trace_is_told_in_a_line(trace):
    tokens = f"{trace.tokens} tokens of 3 requests in {trace.steps} steps"
    assert repr(trace) == f"<Trace: {tokens}; 3 layers x 8 experts, top 2; with weights>"
    assert repr(simulate({"t": trace}, Sweep(policies=["lru"], budgets=["50%"], fit=0))).startswith("<Result: 4 rows")


def test_without_pandas_a_line_says_what_to_install(trace, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for call in (trace.to_pandas, lambda: to_pandas(STATS)):
        with pytest.raises(HotsetError, match=r"data frames need pandas: pip install 'hotset\[pandas\]'"):
            call()


def test_what_is_no_result_is_refused(trace):
    pytest.importorskip("pandas")
    with pytest.raises(HotsetError, match="no data frame of 3: give a trace"):
        to_pandas(3)


def test_a_trace_as_a_frame(trace):
    pytest.importorskip("pandas")
    frame = trace.to_pandas()
    assert list(frame.columns) == ["request", "step", "token", "phase", "layer", "rank", "expert", "weight", "topic"]
    assert len(frame) == trace.experts.size
    last = frame.iloc[-1]
    assert (last.token, last.layer, last["rank"]) == (trace.tokens - 1, 2, 1)
    assert last.expert == trace.experts[-1, -1, -1]
    assert last.weight == pytest.approx(float(trace.weights[-1, -1, -1]))
    by_phase = frame.groupby("phase", observed=True).token.nunique()
    assert by_phase["decode"] == trace.count(hotset.Phase.DECODE)


def test_labels_are_columns(trace):
    pytest.importorskip("pandas")
    from dataclasses import replace

    labelled = replace(trace, labels=({"topic": "a", "layer": "x"}, {"topic": "b"}, {"topic": "a"}))
    frame = to_pandas(labelled)
    assert set(frame[frame.request == 1].topic) == {"b"}
    assert set(frame[frame.request == 0].label_layer) == {"x"}


def test_results_as_frames(trace):
    pytest.importorskip("pandas")
    result = simulate({"t": trace}, Sweep(policies=["lru"], budgets=["50%"], fit=0))
    frame = to_pandas(result)
    assert frame.policy.tolist() == [row.policy for row in result.rows]
    assert frame.hit_rate.tolist() == [row.hit_rate for row in result.rows]
    judged = evaluate(trace, ["previous"], (1,))
    assert to_pandas({"t": judged}).recall.tolist() == [judged.scores[0].recall]
    assert to_pandas(judged).forecast.tolist() == ["previous"]
    stats = to_pandas(STATS)
    assert stats["decode.hit_rate"].tolist() == [0.5]
    assert stats["decode.gain.points"].tolist() == [1]
    assert to_pandas([STATS, STATS]).shape == (2, 4)


def test_forecasts_as_csv(trace):
    judged = evaluate(trace, ["previous"], (1, 2))
    rows = list(csv.DictReader(io.StringIO(forecasts_to_csv({"t": judged}))))
    assert [(row["trace"], row["forecast"], row["distance"]) for row in rows] == [
        ("t", "previous", str(d)) for d in (1, 2)
    ]
    assert float(rows[0]["recall"]) == judged.scores[0].recall
    assert "bins" not in rows[0]


def test_studies_as_csv():
    study = find("policies")
    keys = [column.key for column in study.columns]
    row = dict.fromkeys(keys, 1) | {"more": "x"}
    rows = list(csv.DictReader(io.StringIO(study_to_csv(StudyResult(study, [], [row, row], [])))))
    assert list(rows[0]) == [*keys, "more"]
    assert len(rows) == 2
