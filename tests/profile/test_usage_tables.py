"""The tables of use fit a terminal of 80 columns, whatever the numbers, and leave out what is not known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from profile_samples import full_profile
from rich.console import Console, RenderableType

from hotset.profile.statistics import NEVER, Statistics
from hotset.report.usage import concentration, count, expert_table, layer_figures, layer_table, phase_table
from hotset.shape import ModelShape
from hotset.trace.summary import entropy


def drawn(view: RenderableType) -> list[str]:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(view)
    return capture.get().splitlines()


@pytest.fixture
def busy() -> Statistics:
    """A large model after a very long run."""
    random, shape = np.random.default_rng(0), ModelShape(94, 512, 8, 18 << 20)
    grid = (94, 512)
    counts = random.integers(10**8, 10**10, (2, *grid))
    return Statistics(
        shape=shape,
        uses=counts.astype(float),
        hits=counts,
        misses=counts // 3,
        tokens=np.array([10**12, 10**12]),
        loads=counts[0],
        loaded_bytes=counts[0] * 100,
        rate=random.random(grid),
        window=random.integers(0, 128, grid),
        age=random.integers(0, 10**9, grid),
        resident=random.random(grid) < 0.9,
        pinned=random.random(grid) < 0.5,
    )


def test_nothing_is_cut_off_at_80_columns(busy: Statistics) -> None:
    for view in (phase_table(busy), layer_table(busy), expert_table(busy, 93, 20)):
        lines = drawn(view)
        assert all(len(line) <= 80 for line in lines)
        assert "…" not in "".join(lines)


def test_a_busy_expert_shows_all_that_is_known(busy: Statistics) -> None:
    text = "\n".join(drawn(expert_table(busy, 0)))
    for word in ("expert", "uses", "hits", "misses", "loads", "loaded", "window", "ago", "where", "pinned"):
        assert word in text


def test_what_is_not_known_is_left_out() -> None:
    statistics = full_profile(hits=None, misses=None, residency=None).statistics()
    text = "\n".join(drawn(expert_table(statistics, 0)))
    assert not any(word in text for word in ("hits", "loaded", "window", "ago", "where"))


def test_an_age_of_zero_and_no_hit_at_all_are_known(busy: Statistics) -> None:
    none, now = np.zeros_like(busy.hits), np.zeros_like(busy.age)
    text = "\n".join(drawn(expert_table(replace(busy, hits=none, age=now), 0)))
    assert "0.0 %" in text
    assert "ago" in text
    never = replace(busy, age=np.full_like(busy.age, NEVER))
    assert "ago" not in "\n".join(drawn(expert_table(never, 0)))


def test_figures_of_an_even_and_of_an_unused_layer() -> None:
    uses = np.zeros((2, 3, 8))
    uses[1, 0], uses[1, 1, 0] = 1, 5
    statistics = full_profile(uses=uses).statistics()
    assert entropy(statistics.uses.sum(axis=0))[:2].tolist() == [1, 0]
    assert np.isnan(entropy(statistics.uses.sum(axis=0))[2])
    assert concentration(statistics)["12.5%"] == pytest.approx((1 / 8 + 1) / 2)
    assert concentration(full_profile(uses=0 * uses).statistics())["25.0%"] is None
    assert layer_figures(statistics, [2], 1)[0]["entropy"] is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (9999, "9999"), (12_340, "12.3k"), (999_900, "1M"), (4_560_000, "4.56M"), (1e11, "100G")],
)
def test_counts_are_short(value: float, text: str) -> None:
    assert count(value) == text
