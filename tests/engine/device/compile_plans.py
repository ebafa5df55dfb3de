"""Compiles what plans and prefetches on the device, as the engine launches it, for GPUs that need not be there.

``python tests/engine/device/compile_plans.py some 80 most 90`` prints the size of each kernel: `some` are those of a
model by default, `most` are of all policies, and `all` of `nextuse` with several requests, too, which takes long.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from hotset.cache.controller import Controller
from hotset.cache.plan import SlotPlan
from hotset.engine import support
from hotset.engine.device.gather import Gather
from hotset.engine.device.plan import Plan
from hotset.engine.device.prefetch import DevicePrefetch
from hotset.engine.device.prefetch_state import PrefetchState
from hotset.engine.device.table import DeviceTable
from hotset.policies import Admit, parse
from hotset.prefetch import Driver, plan_prefetch
from hotset.shape import ModelShape

SMALL = (
    "blend:transitions=off", "blend:admit=always", "lfu", "lfu:history=off", "lfru", "decay:half_life=64", "slru",
    "slru:hint=on",
)  # fmt: skip
LATE = ("lru:admit=late", "nextuse")
ONE, SEVERAL = (ModelShape(24, 32, 4), 1), (ModelShape(48, 128, 8), 8)
ROWS = 6
SLOT_BYTES = 1 << 15


class Absent:
    """Stands in for the GPU of this kind, so far as launches ask for it before they compile."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """A number of its own: what was compiled is kept by it."""
        return int(self._target.arch)

    def get_current_stream(self, _: int) -> int:
        """Any."""
        return 0


def compile_only(capability: int) -> list[Any]:
    """From here on each launch only compiles its kernel, with the types that it has, and adds it to this list."""
    made: list[Any] = []

    def compiled(kernel: Any, grid: Any, *given: Any, **options: Any) -> None:
        made.append(kernel.warmup(*given, grid=grid, **options))

    driver.set_active(Absent(capability))
    JITFunction.__getitem__ = lambda kernel, grid: partial(compiled, kernel, grid)  # type: ignore[method-assign]
    return made


def plan_of(spec: str, shape: ModelShape, tokens: int, *, listed: bool = False) -> Plan:
    """What plans events of so many tokens, with rows of staging one after the other or listed."""
    staging = min(tokens * shape.top_k, shape.experts)
    host = Controller(SlotPlan(shape, 8 * shape.layers, staging=staging), parse(spec))
    table, rows = DeviceTable.upload(host, "cpu"), torch.zeros(8 * shape.layers, dtype=torch.int32)
    listed |= host.policy.admission is Admit.LATE
    pairs = tokens * shape.top_k
    return Plan(host, table, pairs, rows, host.plan.cached, staging=rows[:staging] if listed else None)


def plan(spec: str, shape: ModelShape, tokens: int, *, listed: bool = False) -> None:
    """Launch what plans an event, and what follows requests before it."""
    planned = plan_of(spec, shape, tokens, listed=listed)
    planned(1, torch.zeros(tokens * shape.top_k, dtype=torch.int64))


def prefetch(shape: ModelShape, tokens: int) -> None:
    """Launch what copies and prefetches in steps of so many tokens: far from the last layer, and next to it."""
    planned, rules = plan_of("lru", shape, tokens), plan_prefetch(Driver.DEVICE, shape, rows=ROWS)
    host, rows = (torch.zeros(SLOT_BYTES, dtype=torch.uint8) for _ in range(2))
    host_rows = torch.zeros((shape.layers, shape.experts), dtype=torch.int32)
    gather = Gather(host, rows, SLOT_BYTES, [SLOT_BYTES - 8] * shape.layers, host_rows)
    state = PrefetchState.of(range(ROWS), shape.layers, shape.experts, rules, "cpu")
    ahead = DevicePrefetch(state, rules, gather, tokens=tokens, top_k=shape.top_k)
    out, index = planned.out, torch.zeros(tokens * shape.top_k, dtype=torch.int64)
    gather(1, out.loads, out.missing, out.job_row)
    ahead.claim(1, out, planned.table.table.slot_of, planned.row_of, index)
    ahead.fetch(1, out)
    for layer in (1, shape.layers - 2):
        ahead.pick(layer, [torch.zeros((tokens, shape.experts)) for _ in range(ahead.targets(layer))])
        ahead.send(layer)


def launches(extent: str) -> Iterator[tuple[str, Any]]:
    """What is launched, and what to call it: some, most or all."""
    yield "blend 1x32", partial(plan, "blend", *ONE)
    yield "lru 1x32", partial(plan, "lru", *ONE)  # `auto` may switch to it
    yield "prefetch 1x32", partial(prefetch, *ONE)
    if extent == "some":
        return
    for spec in (*SMALL, *LATE):
        yield f"{spec} 1x32", partial(plan, spec, *ONE)
    yield "lru,listed 1x32", partial(plan, "lru", *ONE, listed=True)
    for spec in ("blend", "lru", LATE[0], *(LATE[1:] if extent == "all" else ())):
        yield f"{spec} 8x128", partial(plan, spec, *SEVERAL)
    yield "prefetch 8x128", partial(prefetch, *SEVERAL)


def main(words: Sequence[str]) -> None:
    """Compile for each kind of GPU; a kernel that cannot be compiled raises."""
    support.LATE_HAS_RUN = True
    for extent, capability in zip(words[::2], map(int, words[1::2]), strict=True):
        made = compile_only(capability)
        for name, launch in launches(extent):
            launch()
            for one in made:
                instructions = len(re.findall(r"\n\s+[a-z@]", one.asm["ptx"]))
                barriers = one.asm["ptx"].count("bar.sync")
                told = f"{instructions} instructions {barriers} barriers"
                print(capability, name, one.metadata.name, told, flush=True)
            made.clear()


if __name__ == "__main__":
    main(sys.argv[1:] or ["all", "90"])
