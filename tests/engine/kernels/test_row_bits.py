"""The bits of an expert's output do not depend on which other experts are computed in the same call.

Torch computes the remainder of a vectorised loop by other code than its body, and how wide a vector is depends on the
processor: tests/engine/kernels/test_vector_widths.py runs this file for narrower ones, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from hotset.engine.arena import Arena
from hotset.engine.kernels.cpu import SERIAL, RowExperts, by_expert
from hotset.engine.kernels.spec import ExpertSpec
from hotset.models.adapters._common import gated
from hotset.store import Part, SlotLayout

Tensor = torch.Tensor

ACTIVATIONS = [
    "gelu", "gelu_new", "gelu_pytorch_tanh", "laplace", "leaky_relu", "mish", "quick_gelu", "relu", "relu2",
    "relu6", "selu", "sigmoid", "silu", "softplus", "swish", "tanh",
]  # fmt: skip
WIDTHS = (1, 7, 16, 24, 31, 33, 48, 64, 80, 96, 100, 192)
COUNTS = (1, 1, 3, 1, 2, 5, 1, 4)  # rows of each expert


def interleaved(both: Tensor) -> Tensor:
    """The gate of gpt-oss: every second column, limited."""
    gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


GATES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    **{name: (ACT2FN[name], 1) for name in ACTIVATIONS if name in ACT2FN},
    **{f"gated {name}": (gated(ACT2FN[name]), 2) for name in ("silu", "gelu_pytorch_tanh", "sigmoid")},
    "interleaved": (interleaved, 2),
    "softmax": (lambda rows: rows.softmax(-1), 1),
}


@pytest.fixture(autouse=True, params=[1, 3], ids=["1 thread", "3 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    with torch.no_grad():
        yield request.param
    torch.set_num_threads(before)


def ends_of(counts: tuple[int, ...]) -> list[int]:
    return torch.tensor(counts).cumsum(0).tolist()


def alone(function: Callable[[Tensor], Tensor], rows: Tensor, counts: tuple[int, ...]) -> Tensor:
    return torch.cat([function(given.clone()) for given in rows.split_with_sizes(counts)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", GATES)
def test_an_activation_gives_rows_together_the_bits_they_have_alone(name: str, dtype: torch.dtype) -> None:
    gate, factor = GATES[name]
    torch.manual_seed(0)
    for width in WIDTHS:
        rows = torch.randn(sum(COUNTS), factor * width).mul(3).to(dtype)
        assert torch.equal(by_expert(gate, rows, ends_of(COUNTS), width), alone(gate, rows, COUNTS)), width


@pytest.mark.parametrize("width", [768, 2880])
def test_a_prompt_that_torch_cuts_among_threads_has_the_same_bits(width: int) -> None:
    """5 threads take shares of 301 rows that end within a block: the rows there differ from what they are alone."""
    torch.manual_seed(0)
    torch.set_num_threads(5)
    counts = (60, 1, 140, 2, 98)
    rows = torch.randn(sum(counts), width) * 3
    assert rows.numel() > 5 * SERIAL
    silu = nn.functional.silu
    assert torch.equal(by_expert(silu, rows, ends_of(counts), width), alone(silu, rows, counts))


def test_an_expert_that_torch_cuts_within_a_block_is_computed_alone_though_all_together_are_not() -> None:
    """5 threads share 301 rows of one expert unevenly, and the 305 rows of all evenly."""
    torch.manual_seed(0)
    torch.set_num_threads(5)
    rows, silu = torch.randn(305, 768) * 3, nn.functional.silu
    assert torch.equal(by_expert(silu, rows, [301, 305], 768), alone(silu, rows, (301, 4)))


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_a_norm_gives_rows_together_the_bits_they_have_alone(norm: Callable[[int], nn.Module]) -> None:
    torch.manual_seed(0)
    for width in WIDTHS:
        rows = torch.randn(sum(COUNTS), width)
        made = norm(width)
        assert torch.equal(by_expert(made, rows, ends_of(COUNTS), width), alone(made, rows, COUNTS)), width


@pytest.mark.parametrize("width", [16, 24, 48, 64, 100])
@pytest.mark.parametrize("name", ["interleaved", "gated silu", "silu"])
def test_experts_in_slots_compute_alone_what_they_compute_together(name: str, width: int) -> None:
    gate, factor = GATES[name]
    torch.manual_seed(0)
    hidden, slots = 48, list(range(len(COUNTS)))
    layout = SlotLayout.of([Part("up", (factor * width, hidden), "float32"), Part("down", (hidden, width), "float32")])
    arena = Arena.in_ram(len(slots), 4096 * -(-layout.used_bytes // 4096))
    for part in layout.parts:
        arena.view(part).normal_(std=0.3)
    experts = RowExperts(arena, layout, ExpertSpec("up", "down", gate))
    rows = torch.randn(sum(COUNTS), hidden)
    together = experts(rows, slots, ends_of(COUNTS))
    ranges = zip(slots, rows.split_with_sizes(COUNTS), COUNTS, strict=True)
    assert torch.equal(together, torch.cat([experts(given, [slot], [count]) for slot, given, count in ranges]))
    one = experts(rows[:1], slots, ends_of((1,) * len(slots)))
    assert torch.equal(one, torch.cat([experts(rows[:1], [slot], [1]) for slot in slots]))


def test_real_widths_are_computed_in_one_call() -> None:
    """No copy and no loop where it changes nothing: one call for all experts of a token."""
    torch.set_num_threads(3)
    calls = []
    for width in (512, 768, 1408, 2048, 2880, 14336):
        by_expert(lambda rows: calls.append(len(rows)) or rows, torch.zeros(2, width), [1, 2], width)
    assert calls == [2] * 6
    torch.set_num_threads(2)
    by_expert(lambda rows: calls.append(len(rows)) or rows, torch.zeros(8, 2 * 5632), list(range(1, 9)), 5632)
    assert calls[6:] == [8]
