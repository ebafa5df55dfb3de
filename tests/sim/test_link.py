"""The modelled link, computed by hand."""

import numpy as np
import pytest
from sim_samples import random_trace, trace_of

from hotset.errors import HotsetError
from hotset.shape import ModelShape
from hotset.sim import Link
from hotset.sim.link import parse_duration, parse_speed
from hotset.trace import Phase

SHAPE = ModelShape(2, 4, 2, expert_bytes=1000)


def two_tokens():
    token = [[0, 1], [2, 3]]
    return trace_of(SHAPE, [[(Phase.DECODE, [token]), (Phase.DECODE, [token])]]).events()


def test_stall_and_time():
    # An expert takes 1 ms; a layer computes for 2 ms, half of it experts.
    link = Link(bytes_per_s=1e6, compute_s=4e-3)
    # No miss: no stall. One of two: 1 ms on the link, behind 0.5 ms of the resident one. Two of two: 2 ms in the open.
    times = link.times(two_tokens(), np.array([0, 1, 2, 0], np.int32), Phase.DECODE)
    assert times.stall_s == pytest.approx(0.5e-3 + 2e-3)
    assert times.total_s == pytest.approx(2.5e-3 + 4 * 2e-3)


def test_latency_counts_once_per_event_with_a_miss():
    link = Link(bytes_per_s=1e6, compute_s=4e-3, latency_s=0.3e-3)
    times = link.times(two_tokens(), np.array([0, 1, 2, 0], np.int32), Phase.DECODE)
    assert times.stall_s == pytest.approx((1.3 - 0.5 + 2.3) * 1e-3)


def test_a_fast_link_hides_behind_the_resident_experts():
    link = Link(bytes_per_s=4e6, compute_s=4e-3)
    times = link.times(two_tokens(), np.array([1, 1, 1, 1], np.int32), Phase.DECODE)
    assert times == (0.0, pytest.approx(8e-3))


def test_no_expert_share_hides_nothing():
    link = Link(bytes_per_s=1e6, compute_s=4e-3, expert_share=0.0)
    times = link.times(two_tokens(), np.array([0, 1, 0, 0], np.int32), Phase.DECODE)
    assert times.stall_s == pytest.approx(1e-3)


def test_the_least_time_is_all_compute_or_all_transfers_and_no_latency():
    link = Link(bytes_per_s=1e6, compute_s=4e-3, latency_s=1.0)
    assert link.least_s(4, 0, SHAPE) == pytest.approx(8e-3)  # two passes of two layers
    assert link.least_s(4, 8, SHAPE) == pytest.approx(8e-3)  # 8 ms of transfers, all behind them
    assert link.least_s(4, 9, SHAPE) == pytest.approx(9e-3)


def test_no_replay_is_below_the_least_time_of_its_misses():
    events = random_trace(prompt=3).events()
    rng = np.random.default_rng(0)
    for expert_share in (0.0, 0.5, 1.0):
        for speed in (1e5, 1e6, 1e7):
            link = Link(bytes_per_s=speed, compute_s=3e-3, expert_share=expert_share)
            misses = rng.integers(0, np.diff(events.start) + 1).astype(np.int32)
            for phase in Phase:
                chosen = events.phase == phase
                least_s = link.least_s(int(chosen.sum()), int(misses[chosen].sum()), events.shape)
                assert least_s <= link.times(events, misses, phase).total_s


def test_phases_are_apart():
    events = random_trace(prompt=3, requests=1, tokens=5).events()
    link = Link(bytes_per_s=1e6, compute_s=3e-3)
    misses = np.diff(events.start).astype(np.int32)
    prefill, decode = (link.times(events, misses, phase) for phase in (Phase.PREFILL, Phase.DECODE))
    asked = [np.diff(events.start)[events.phase == phase].sum() for phase in (Phase.PREFILL, Phase.DECODE)]
    assert prefill.stall_s == pytest.approx(1e-3 * asked[0])
    assert decode.stall_s == pytest.approx(1e-3 * asked[1])
    assert decode.total_s == pytest.approx(decode.stall_s + 5 * 3e-3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bytes_per_s": 0.0},
        {"bytes_per_s": -1.0},
        {"compute_s": 0.0},
        {"latency_s": -1e-6},
        {"expert_share": 1.5},
        {"expert_share": -0.1},
    ],
)
def test_a_link_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(HotsetError, match=r"a link needs a speed|of a link must be"):
        Link(**{"bytes_per_s": 1e9, "compute_s": 1e-3, **wrong})


@pytest.mark.parametrize(
    ("text", "bytes_per_s"), [("25GB/s", 25e9), ("1GiB/s", 2.0**30), (" 500 MB/s ", 5e8), ("7/s", 7.0)]
)
def test_speeds(text, bytes_per_s):
    assert parse_speed(text) == bytes_per_s


@pytest.mark.parametrize("text", ["25GB", "", "/s", "fast/s", "-1GB/s", "25 Gbit/s", "GB/s", "1e9/s"])
def test_wrong_speeds(text):
    with pytest.raises(HotsetError, match="cannot read"):
        parse_speed(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("4ms", 4e-3), ("250us", 250e-6), ("250 µs", 250e-6), ("0.5s", 0.5), (" 1.5 ms ", 1.5e-3)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["4", "", "ms", "-4ms", "4 min", "1e-3s", "4ms4", ".5s", "nan s"])
def test_wrong_durations(text):
    with pytest.raises(HotsetError, match="cannot read the duration"):
        parse_duration(text)
