"""Model shapes, and budgets as people write them."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotset.errors import BudgetError, HotsetError
from hotset.shape import Budget, ModelShape, format_size, parse_size

SHAPE = ModelShape(layers=4, experts=16, top_k=2, expert_bytes=1 << 20)


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("1536 slots", 64),  # never more than the model has
        ("12 slots", 12),
        ("1 slot", 1),
        ("25%", 16),
        ("12.5 %", 8),
        ("100%", 64),
        ("8MiB", 8),
        ("8.5 MiB", 8),
        ("8GB", 64),
        ("10000000", 9),
    ],
)
def test_budgets_buy_slots(text: str, slots: int) -> None:
    assert Budget.parse(text).slots_for(SHAPE) == slots


@pytest.mark.parametrize("text", ["", "x", "-1 slots", "0%", "101%", "25 %%", "8 XB", "1e9", "nan%", "∞", "8GiB/s"])
def test_unreadable_budgets_are_refused(text: str) -> None:
    with pytest.raises(BudgetError):
        Budget.parse(text).slots_for(SHAPE)


def test_bytes_need_the_size_of_an_expert() -> None:
    with pytest.raises(BudgetError, match="--expert-bytes"):
        Budget.parse("8GiB").slots_for(ModelShape(4, 16, 2))


@pytest.mark.parametrize(
    "shape", [(0, 8, 2), (4, 0, 1), (4, 8, 0), (4, 8, 9), (5000, 8, 2), (4, 40000, 2), (4000, 8000, 2)]
)
def test_impossible_shapes_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(HotsetError):
        ModelShape(*shape)


def test_a_token_cycle_is_what_one_token_uses() -> None:
    assert SHAPE.token_cycle == 8
    assert SHAPE.total_experts == 64


@given(st.text(max_size=20))
def test_any_text_is_a_budget_or_a_clear_error(text: str) -> None:
    with suppress(BudgetError):
        assert 0 <= Budget.parse(text).slots_for(SHAPE) <= SHAPE.total_experts


@pytest.mark.parametrize(
    ("text", "size"), [("1KiB", 1024), ("1KB", 1000), ("1.5k", 1500), ("2 tib", 2 << 40), ("7B", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1010 << 20, "1010 MiB"), (1536, "1.50 KiB"), (25 << 30, "25.0 GiB"), (1 << 52, "4096 TiB")],
)
def test_sizes_are_written_for_people(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize("text", ["25", " 100 ", "0.5"])
def test_a_bare_number_that_could_be_a_share_is_asked_about(text: str) -> None:
    word = text.strip()
    with pytest.raises(BudgetError, match=f'{word} % of the experts, or {word} bytes. Write "{word}%", or "{word}B"'):
        Budget.parse(text)
    assert Budget.parse(f"{word}%").fraction == float(word) / 100
    assert Budget.parse(f"{word}B").size_bytes == int(float(word))
    assert Budget.parse("4096").size_bytes == 4096
