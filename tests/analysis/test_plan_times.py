"""A token's time, computed by hand from given rates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_samples import HITS, MODEL, PRECISION, RATES, SIZE

from hotset.analysis.planner.rates import ExpertPoint, cpu_rates, gpu_rates
from hotset.analysis.planner.times import TokenTimes, together_s

TIMES = TokenTimes(MODEL, PRECISION, RATES)
REST_S = 2 * 1e-3 + 1e6 / 1e9  # two layers, and 1 MB at 1 GB/s
EXPERT_S = SIZE / (0.5 * 1e9)  # at half of the memory's speed
MOVE_S = SIZE / 1e8


def test_everything_resident() -> None:
    expected = REST_S + 2 * (1e-4 + 2 * EXPERT_S)
    assert pytest.approx(expected) == TIMES.resident_s
    assert TIMES.token_s(HITS.curves["blend"])[-1] == pytest.approx(expected)


def test_nothing_resident() -> None:
    fixed_s = 1e-4 + 2e-4 + 2 * 3e-4
    expected = REST_S + 2 * (fixed_s + 2 * EXPERT_S + 2 * MOVE_S)
    assert TIMES.token_s(HITS.curves["blend"])[0] == pytest.approx(expected)


def test_half_resident() -> None:
    expected = REST_S + 2 * (1e-4 + 2e-4 + 3e-4 + 2 * EXPERT_S + MOVE_S)
    assert TIMES.token_s(HITS.curves["blend"])[1] == pytest.approx(expected)


def test_disk_behind_ram_adds_what_ram_does_not_hold() -> None:
    # Without events to replay: of the four misses of a token with 2 slots a cache of RAM's 4 slots would miss 2.
    far = HITS.far_misses("blend", 4)
    assert far.tolist() == [2, 2, 1, 0]
    assert HITS.held_slots("blend", 2, 4) == 4
    rates = replace(RATES, far_bytes_per_s=1e7)
    found = TokenTimes(MODEL, PRECISION, rates).token_s(HITS.curves["blend"], far=far)
    assert found[0] - TIMES.token_s(HITS.curves["blend"])[0] == pytest.approx(2 * SIZE / 1e7)


@pytest.mark.parametrize(
    ("kept", "busy", "expected"),
    [
        (0.0, 1.0, 4.0 + 2.0),  # one after the other
        (1.0, 1.0, 4.0),  # at once, and the transfer ends first
        (0.5, 1.0, 4.0 + 2.0 * 0.5),
        (0.5, 0.5, 4.0 + 4.0 * 0.5),
    ],
)
def test_compute_beside_a_shorter_transfer(kept: float, busy: float, expected: float) -> None:
    assert together_s(4.0, 2.0, replace(RATES, kept=kept, busy=busy)) == pytest.approx(expected)


def test_compute_beside_a_longer_transfer() -> None:
    # One second of compute takes two beside the transfer, in which 2 of its 10 seconds are done: 8 are left.
    assert together_s(1.0, 10.0, replace(RATES, kept=0.5)) == pytest.approx(2.0 + 8.0)
    assert together_s(1.0, 0.0, RATES) == 1.0
    assert together_s(0.0, 3.0, RATES) == 3.0


def test_more_missing_never_takes_less() -> None:
    for kept in (0.0, 0.3, 1.0):
        times = TokenTimes(MODEL, PRECISION, replace(RATES, kept=kept, busy=0.8)).by_missing()
        assert (np.diff(times) >= 0).all()


def test_measured_experts_are_taken_before_the_memorys_speed() -> None:
    points = (
        ExpertPoint("bfloat16", MODEL.matrices, SIZE, 5e-4, 1e-2),
        ExpertPoint("int4", ((64, 64), (64, 64)), 8192, 1e-5, 1e-3),
    )
    rates = replace(RATES, experts=points)
    assert rates.expert_s("bfloat16", MODEL.matrices, SIZE) == 5e-4
    assert rates.expert_s("int4", MODEL.matrices, 16384) == pytest.approx(2e-5)  # as fast per byte as the nearest
    assert rates.expert_s("mxfp4", MODEL.matrices, SIZE) == pytest.approx(EXPERT_S)


def test_the_bound_holds_where_products_were_seen_to_outrun_the_memory() -> None:
    plain = TokenTimes(MODEL, PRECISION, RATES)
    assert plain.floor_s(0.0) == pytest.approx((1e6 + 4 * SIZE) / 1e9)
    quick = replace(
        RATES, layer_s=0.0, event_s=0.0, experts=(ExpertPoint("bfloat16", MODEL.matrices, SIZE, 1e-6, 1e-3),)
    )
    times = TokenTimes(MODEL, PRECISION, quick)
    assert times.floor_s(0.0) <= times.resident_s < plain.floor_s(0.0)


def test_machines_that_are_not_there_scale_with_their_memory() -> None:
    slow, fast = (cpu_rates(speed, 1e9).expert_s("int4", MODEL.matrices, SIZE) for speed in (1e10, 4e10))
    assert slow == pytest.approx(4 * fast)
    device, host = (gpu_rates(1e12, 5e10, 3e9, host=host) for host in (False, True))
    assert device.layer_s < host.layer_s
    assert device.miss_bytes_per_s < host.miss_bytes_per_s == 5e10
