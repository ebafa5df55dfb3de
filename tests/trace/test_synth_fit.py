import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from hotset.cli.trace_synth import synth
from hotset.errors import TraceError
from hotset.shape import ModelShape
from hotset.trace import NONE, Phase, Trace
from hotset.trace.synth import SynthConfig, synthesise
from hotset.trace.synth_fit import FIT_EVALUATIONS, FitReport, fit, measure

PUBLIC = Path(__file__).parents[2].parent / "shared/traces/gpt-oss-20b.npz"
KNOWN = SynthConfig(
    layers=6, experts=16, top_k=2, requests=30, prompt_tokens=4, new_tokens=80, topics=8, skew=0.9,
    topic_strength=0.4, locality=0.5, slow=0.5, slow_tokens=10.0, drift=0.1, topic_stay=0.3, seed=5,
)  # fmt: skip


def tiny(rows: list[list[list[int]]], request: list[int]) -> Trace:
    experts = np.array(rows, np.int16)
    tokens, layers, top_k = experts.shape
    return Trace(
        shape=ModelShape(layers, 8, top_k),
        experts=experts,
        request=np.array(request, np.int32),
        step=np.arange(tokens, dtype=np.int32),
        phase=np.full(tokens, Phase.DECODE, np.uint8),
    )


@pytest.fixture(scope="module")
def known() -> FitReport:
    return fit(synthesise(KNOWN), seed=1)


def test_repeats_are_counted_within_a_request() -> None:
    found = measure(tiny([[[0, 1]], [[1, 2]], [[1, 2]], [[1, 2]]], [0, 0, 1, 1]))
    assert found["repeat_1"] == pytest.approx(3 / 4)
    assert "repeat_4" not in found


def test_interleaved_requests_are_taken_apart() -> None:
    found = measure(tiny([[[0, 1]], [[2, 3]], [[0, 1]], [[2, 3]]], [0, 1, 0, 1]))
    assert found["repeat_1"] == 1.0
    assert found["cosine_requests"] == 0.0
    assert found["cosine_halves"] == pytest.approx(1.0)


def test_unused_places_are_no_experts() -> None:
    found = measure(tiny([[[0, NONE]], [[0, NONE]]], [0, 0]))
    assert found["repeat_1"] == 1.0
    assert found["top_fifth"] == 1.0


def test_fit_recovers_the_statistics_of_known_parameters(known: FitReport) -> None:
    assert known.worst_gap < 0.04


def test_fit_keeps_shape_and_lengths(known: FitReport) -> None:
    config, trace = known.config, synthesise(KNOWN)
    assert config.shape() == KNOWN.shape()
    assert config.requests == KNOWN.requests
    assert config.new_tokens == round(trace.count(Phase.DECODE) / 30)
    assert config.prompt_tokens == round(trace.count(Phase.PREFILL) / 30)


def test_fit_is_deterministic(known: FitReport) -> None:
    calls: list[int] = []
    assert fit(synthesise(KNOWN), seed=1, advance=lambda: calls.append(1)) == known
    assert len(calls) == FIT_EVALUATIONS


def test_scaling_for_the_weights_keeps_the_routing(known: FitReport) -> None:
    names = {row.statistic: row for row in known.rows}
    assert names["largest_weight"].reached == pytest.approx(names["largest_weight"].target, abs=0.005)
    again = measure(synthesise(known.config))
    assert again["repeat_1"] == pytest.approx(names["repeat_1"].reached, abs=0.02)


def test_one_request_has_no_topics() -> None:
    alone = SynthConfig(layers=12, experts=16, top_k=2, requests=1, prompt_tokens=0, new_tokens=1500)
    report = fit(synthesise(alone))
    assert (report.config.topics, report.config.topic_strength, report.config.drift) == (1, 0.0, 0.0)
    assert report.worst_gap < 0.06


def test_a_trace_of_prompts_only_is_refused() -> None:
    trace = synthesise(KNOWN)
    with pytest.raises(TraceError, match="no decode tokens"):
        fit(trace.take(trace.phase == Phase.PREFILL))


def test_command_fits_and_reports(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(synth)
    real, out = tmp_path / "real", tmp_path / "out"
    synthesise(KNOWN).save(real)
    words = ["-o", str(out), "--fit", str(real), "--topics", "4", "--requests", "5", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    assert (document["config"]["topics"], document["config"]["requests"]) == (4, 5)
    assert {row["statistic"] for row in document["fit"]} >= {"top_fifth", "repeat_1", "cosine_requests"}
    assert Trace.load(out).requests == 5


@pytest.mark.public_traces
@pytest.mark.skipif(not PUBLIC.exists(), reason="the public traces are not beside the checkout")
def test_real_routing_is_matched() -> None:
    """The first 150 tokens of every tenth request, to be quick; docs/reference/synthetic.md has the whole."""
    with np.load(PUBLIC) as data:
        lengths = data["req_len"].astype(np.int64)
        request = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(len(request)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        chosen = (request % 10 == 0) & (place < 150)
        experts, request = data["experts"][chosen].astype(np.int16), request[chosen] // 10
    tokens = len(experts)
    trace = Trace(
        shape=ModelShape(24, 32, 4),
        experts=experts,
        request=request.astype(np.int32),
        step=np.arange(tokens, dtype=np.int32),
        phase=np.full(tokens, Phase.DECODE, np.uint8),
    )
    assert fit(trace).worst_gap < 0.05
