"""Write an eviction policy and replay it against lru and the optimum.

python examples/own_policy.py [TRACE]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import hotset
from hotset.cache import Controller, SlotPlan
from hotset.policies import EventView, Grid, Policy, compiled, parse


class LruTwoState(NamedTuple):
    """When each expert was last used, and the time before."""

    last: Grid
    before: Grid


@compiled
def observe(state: LruTwoState, table: Any, event: EventView) -> None:  # noqa: ARG001 - every policy takes the same arguments
    """Note the time of use."""
    for expert in event.experts:
        state.before[event.layer, expert] = state.last[event.layer, expert]
        state.last[event.layer, expert] = event.tick


@compiled
def score(state: LruTwoState, table: Any, event: EventView, layer: int, expert: int) -> Any:  # noqa: ARG001
    """The time of the use before the last: what was used only once is evicted first."""
    return state.before[layer, expert]


@dataclass(frozen=True, kw_only=True)
class LruTwo(Policy, name="lru2", observe=observe, score=score):
    """LRU-K with K = 2 (O'Neil 1993)."""

    def start(self, shape: hotset.ModelShape) -> LruTwoState:
        """Nothing was ever used."""
        grid = (shape.layers, shape.experts)
        return LruTwoState(np.zeros(grid), np.zeros(grid))


POLICY = LruTwo  # for hotset simulate TRACE -p examples/own_policy.py


def main() -> None:
    """Replay a recorded workload, a quarter of the experts resident, and print decode hit rates."""
    trace = hotset.Trace.load(sys.argv[1]) if len(sys.argv) > 1 else hotset.reference.trace("switch")
    plan = SlotPlan(trace.shape, trace.shape.total_experts // 4)
    events = trace.events()
    for policy in (parse("lru"), LruTwo(), LruTwo(admit="score"), parse("belady")):
        counters = Controller(plan, policy).replay(events).counters
        print(f"{policy.spec:>16}  {counters.hit_rate(hotset.Phase.DECODE):.1%}")


if __name__ == "__main__":
    main()
