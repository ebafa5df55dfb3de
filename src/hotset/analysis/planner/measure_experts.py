"""Times of experts on this CPU: the engine's own products, on weights out of more memory than caches hold."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch

from hotset.analysis.planner.model import MORE_SPECS, SPECS
from hotset.analysis.planner.rates import FEW_TOKENS, MANY_TOKENS, ExpertPoint, Matrices
from hotset.engine.arena import Arena
from hotset.engine.kernels.cpu import RowExperts
from hotset.engine.kernels.packed import PackedLinear
from hotset.engine.kernels.spec import ExpertSpec
from hotset.formats import laid_out, parse
from hotset.store import SlotLayout
from hotset.store.layout import PAGE_BYTES, round_up

POOL_BYTES = 256 << 20
"""Of experts, several times what the last cache holds."""
EVENT_EXPERTS = 8
_MOST_ROWS = 512


def _gated(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def pool_of(precision: str, matrices: Matrices) -> tuple[RowExperts, int, int]:
    """Experts of any numbers in a precision, how many there are, and the bytes of each."""
    chosen = parse((SPECS | MORE_SPECS)[precision])
    (up, up_matrix), (down, down_matrix) = (
        laid_out(name, chosen, *sides) for name, sides in zip(("up", "down"), matrices, strict=True)
    )
    layout = SlotLayout.of((*up, *down), [each for each in (up_matrix, down_matrix) if each is not None])
    size = round_up(layout.used_bytes, PAGE_BYTES)
    rows = min(max(POOL_BYTES // size, EVENT_EXPERTS + 1), _MOST_ROWS)
    experts = RowExperts(Arena.in_ram(rows, size), layout, ExpertSpec("up", "down", _gated), linear=PackedLinear)
    for linear, sides in zip((experts.up, experts.down), matrices, strict=True):
        for view, part in zip(linear.views, chosen.parts(*sides), strict=True):
            if part.dtype != "uint8":
                view.fill_(0.01)
            elif part.role == "scales":
                view.fill_(118)
            else:
                view.copy_(torch.randint(0, 96, part.shape, dtype=torch.uint8).expand(view.shape))
    return experts, rows, size


def event_of(experts: RowExperts, rows: int, inputs: int, tokens: int = 1) -> Callable[[], object]:
    """One call: an event of several experts with one token, or of one expert with several."""
    draw = random.Random(0)  # noqa: S311 - places, not secrets
    x = torch.randn(tokens, inputs).to(experts.up.dtype)

    def one() -> None:
        if tokens == 1:
            experts(x, draw.sample(range(rows), EVENT_EXPERTS), range(1, EVENT_EXPERTS + 1))
        else:
            experts(x, [draw.randrange(rows)], [tokens])

    return one


def usual_s(call: Callable[[], object], seconds: float, quantile: float = 0.25) -> float:
    """The usual time of a call, over so many seconds and at least five times: the lower quartile of what it took.

    Other work on the machine only ever adds; what differs by itself, as a disk does, is better told by the median.
    """
    times: list[float] = []
    call()
    until_s = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < until_s:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return sorted(times)[int(quantile * len(times))]


@torch.inference_mode()
def measure_expert(precision: str, matrices: Matrices, seconds: float) -> ExpertPoint:
    """The time of one expert, with one token, with few and with many."""
    experts, rows, size = pool_of(precision, matrices)
    inputs = matrices[0][1]
    one_s = usual_s(event_of(experts, rows, inputs), seconds) / EVENT_EXPERTS
    many_s = usual_s(event_of(experts, rows, inputs, MANY_TOKENS), seconds / 2)
    few_s = usual_s(event_of(experts, rows, inputs, FEW_TOKENS), seconds / 2)
    return ExpertPoint(precision, matrices, size, one_s, many_s, few_s)


def memory_bytes_per_s(seconds: float) -> float:
    """How fast all threads together read memory."""
    block = torch.ones(POOL_BYTES // 4, dtype=torch.float32)
    return POOL_BYTES / usual_s(lambda: torch.sum(block), seconds)
