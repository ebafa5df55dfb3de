"""RAM behind a GPU, which sees only what the GPU misses: the compiled replays beside two caches served by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hotset import reference
from hotset.analysis.planner.hits import replay_hits
from hotset.analysis.planner.machines import Told, rates_elsewhere
from hotset.analysis.planner.planning import Planner
from hotset.analysis.planner.rates import Engine
from hotset.analysis.planner.shapes import parse_shape
from hotset.analysis.planner.tiers import HOST_STAGING, Memory, staging_rows
from hotset.cache import Controller, SlotPlan
from hotset.policies import parse
from hotset.trace import Trace
from hotset.trace.synth import SynthConfig, synthesise

SHAPE = "layers=4,experts=16,top_k=2,hidden=512,intermediate=512,vocab=1000"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return synthesise(SynthConfig(layers=4, experts=16, top_k=2, requests=8, prompt_tokens=24, new_tokens=24))


def far_by_hand(trace: Trace, slots: int, ram_slots: int) -> float:
    """Misses of both caches in the answers that count, for one of their tokens."""
    gpu = Controller(SlotPlan(trace.shape, slots, staging=staging_rows(trace.shape, Engine.HOST)), parse("blend"))
    ram = Controller(SlotPlan(trace.shape, ram_slots, staging=HOST_STAGING), parse("blend"))
    far, tokens = 0, 0
    for event, request in zip(trace, trace.events().request.tolist(), strict=True):
        missing = sorted(load.key.expert for load in gpu.serve(event).loads)
        counted = bool(event.phase) and request >= trace.requests // 4
        tokens += counted and event.layer == 0
        for at in range(0, len(missing), HOST_STAGING):
            part = tuple(missing[at : at + HOST_STAGING])
            counts = tuple(event.counts[event.experts.index(expert)] for expert in part)
            asked = replace(event, experts=part, counts=counts)
            far += counted * len(ram.serve(asked).loads)
    return far / tokens


@pytest.mark.parametrize("ram_slots", [8, 24, 48])
def test_as_two_caches_served_one_event_after_the_other(trace: Trace, ram_slots: int) -> None:
    hits = replay_hits(trace)
    sizes = hits.curves["blend"].slots
    found = hits.far_misses("blend", ram_slots)
    for at in (0, 4, len(sizes) - 2):
        assert found[at] == pytest.approx(far_by_hand(trace, int(sizes[at]), ram_slots))
    assert found[-1] == 0
    assert (found <= hits.curves["blend"].misses_per_token() + 1e-9).all()


def test_ram_has_nearly_all_that_a_large_gpu_misses() -> None:
    hits = replay_hits(reference.trace("it"), ("blend",))
    curve, slots, ram_slots = hits.curves["blend"], 430, 288
    far = float(np.interp(slots, curve.slots, hits.far_misses("blend", ram_slots)))
    missing = float(np.interp(slots, curve.slots, curve.misses_per_token()))
    assert missing > 1  # of 64; one cache of 288 slots would miss more still, as if no expert came from RAM
    assert far < missing / 10
    assert hits.held_slots("blend", slots, ram_slots) > 480


def test_the_bound_is_never_below_what_is_expected(trace: Trace) -> None:
    model, told = parse_shape(SHAPE, 512), Told("1GiB", "1GiB", "25GB/s", "1GB/s", "1TB/s")
    size, hits = model.precisions()[0].expert_bytes, replay_hits(trace)
    speeds = []
    for ram in (14, 32, 56):
        for gpu in (10, 24, 48):
            memory = Memory(
                int((ram + HOST_STAGING + 1) * size / 0.8), model.rest_bytes + int(gpu * size / 0.95) + size
            )
            row = Planner(model, memory, hits, rates_elsewhere(told)).row(model.precisions()[0])
            assert row is not None
            assert row.engine == Engine.HOST
            assert row.tokens_per_s <= row.bound_tokens_per_s
            assert row.hit_rate <= row.bound_hit_rate
            speeds.append(row.tokens_per_s)
    grid = np.array(speeds).reshape(3, 3)
    assert (np.diff(grid, axis=0) >= 0).all()  # more RAM is never slower
