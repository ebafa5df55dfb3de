"""The shipped workloads and traces: enough prompts, of the right length, and valid recordings."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from hotset import reference
from hotset.cache import Controller, SlotPlan
from hotset.cli.app import app
from hotset.errors import HotsetError
from hotset.policies import Grid, parse
from hotset.trace import Phase, Trace


@pytest.mark.parametrize("domain", reference.DOMAINS)
def test_every_domain_has_prompts_of_the_right_length(domain: str) -> None:
    prompts = reference.workload(domain).prompts
    assert len(prompts) >= 24
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    trace = reference.trace(domain)
    lengths = np.bincount(trace.request[trace.phase == Phase.PREFILL])
    assert len(lengths) == len(prompts)
    assert lengths.min() >= 20
    assert lengths.max() <= 200


def test_the_mixed_workloads_are_what_their_names_say() -> None:
    chat, switch, users = (reference.workload(name).prompts for name in reference.MIXED)
    assert {prompt.domain for prompt in chat} == {"it"}
    assert len({prompt.session for prompt in chat}) == 1
    order = [prompt.domain for prompt in switch]
    assert list(dict.fromkeys(order)) == ["it", "python", "de"]
    assert order == sorted(order, key=["it", "python", "de"].index)
    assert {prompt.domain for prompt in users} == set(reference.DOMAINS)
    assert len({prompt.session for prompt in users}) == len(users)


@pytest.mark.parametrize("name", reference.workloads())
def test_every_trace_is_complete(name: str) -> None:
    trace = reference.trace(name)
    assert trace.requests == len(reference.workload(name).prompts)
    assert trace.count(Phase.DECODE) >= 16 * trace.requests
    assert trace.weights is not None
    assert trace.token_ids is not None
    assert trace.predictions is not None
    assert trace.predictions.shape[2] == 3
    assert (trace.experts >= 0).all()
    assert trace.weights.astype(np.float32).sum(axis=2) == pytest.approx(1.0, abs=0.01)


def test_trace_info_reads_them_all() -> None:
    names = [f"reference:{name}" for name in reference.workloads()]
    done = CliRunner().invoke(app, ["trace", "info", *names, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)


def test_simulate_takes_them_by_name() -> None:
    done = CliRunner().invoke(app, ["simulate", "reference:it", "-p", "lru", "-b", "25%", "--fit", "0", "--json"])
    assert done.exit_code == 0, done.output
    assert {row["trace"] for row in json.loads(done.stdout)["rows"]} == {"it"}


@pytest.mark.parametrize("call", [reference.workload, reference.trace, reference.trace_path])
def test_an_unknown_name_lists_the_known(call) -> None:
    with pytest.raises(HotsetError, match="there are en_prose"):
        call("klingon")


def recall(trace: Trace, distance: int) -> float:
    """The share of the experts used that were among those predicted so many layers ahead."""
    assert trace.predictions is not None
    predicted = trace.predictions[:, distance:, distance - 1]
    used = trace.experts[:, distance:]
    assert (predicted >= 0).all()
    return float((used[..., :, None] == predicted[..., None, :]).any(-1).mean())


def test_looking_ahead_works_and_fades_with_distance() -> None:
    near, middle, far = (recall(reference.trace("it"), distance) for distance in (1, 2, 3))
    assert near > 0.5
    assert near > middle > far > 8 / 64


def counts(trace: Trace) -> Grid:
    grid = np.zeros((trace.shape.layers, trace.shape.experts))
    layers = np.broadcast_to(np.arange(trace.shape.layers)[None, :, None], trace.experts.shape)
    np.add.at(grid, (layers, trace.experts), 1.0)
    return grid


def static_hit_rate(profile: Grid, trace: Trace) -> float:
    controller = Controller(SlotPlan(trace.shape, trace.shape.total_experts // 4), parse("static"))
    controller.preload(profile)
    return controller.replay(trace.events()).counters.hit_rate(Phase.DECODE)


def test_domains_use_different_experts() -> None:
    """Its own profile beats the others' by 15 points for at least 11 domains: the model is fit for its purpose."""
    traces = {domain: reference.trace(domain) for domain in reference.DOMAINS}
    shares = {domain: counts(trace) / trace.tokens for domain, trace in traces.items()}
    ahead = 0
    for domain, trace in traces.items():
        fit, judged = trace.split(0.5, seed=1)
        others = sum(share for name, share in shares.items() if name != domain)
        ahead += static_hit_rate(counts(fit), judged) - static_hit_rate(np.asarray(others), judged) >= 0.15
    assert ahead >= 11
