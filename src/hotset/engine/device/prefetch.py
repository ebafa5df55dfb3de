"""Prefetch on the device: while a layer computes, the likeliest experts of the next ones are copied, without the host.

When an event was planned, `claim` lets it have what was prefetched for it and `fetch` copies the rest; meanwhile
`pick` queues experts of the next layers, and `send` copies those once the event has all it needs, until the next
one is planned. Whatever has arrived by then need not be fetched again. Each layer ahead has rows of its own, and so has
the event that computes: nothing is overwritten that is used. An expert that is claimed and has a slot brings its row,
and takes that of the slot instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from hotset.engine.device.gather import Gather, Prefetched
from hotset.engine.device.plan import Outputs
from hotset.engine.device.prefetch_kernels import claim, pick, send
from hotset.engine.device.prefetch_state import PrefetchState
from hotset.engine.host.prefetcher import PrefetchCounts
from hotset.prefetch import PrefetchPlan

Tensor = torch.Tensor


class DevicePrefetch:
    """Prefetch in the steps of one size; nothing here waits for the device or allocates, but for `tallies`.

    `state` is made by the plan. `gather` knows the memory of the RAM tier and of the arena. Who plans an event must
    first add one to `state.stop`. Then come `claim`, `fetch` and `send`, on one stream; `pick` comes after `claim` and
    before `send`.
    """

    def __init__(self, state: PrefetchState, plan: PrefetchPlan, gather: Gather, *, tokens: int, top_k: int) -> None:
        work, device = gather.prefetch, gather.rows.device
        if state.progress.shape[1] != work.programs:
            raise ValueError(f"{work} does not go with the state")
        self.state, self.plan, self.gather = state, plan, gather
        self.words_of = torch.tensor(gather.words, dtype=torch.int32, device=device)
        self.layers, self.experts = gather.host_row_of.shape
        self.tokens, self.pairs = tokens, tokens * top_k
        self.job_queued = torch.full((min(self.pairs, self.experts),), -1, dtype=torch.int32, device=device)
        per_part, width = state.queued_expert.shape[1], state.ranked.shape[2]
        self._copied = {
            "experts": self.experts,
            "distances": state.distances,
            "per_part": per_part,
            "programs": work.programs,
            "block": work.block,
        }
        self._shared = self._copied | {
            "layers": self.layers,
            "lanes": _lanes(self.experts),
            "queue_lanes": _lanes(per_part),
            "width": width,
            "rank_lanes": _lanes(width),
        }

    def claim(self, layer: int, out: Outputs, slot_of: Tensor, row_of: Tensor, index: Tensor) -> None:
        """After an event was planned: let it have what was prefetched for it."""
        loads = len(self.job_queued)
        launch: Any = claim[(3 + self.state.distances,)]
        launch(
            index, layer, self.state, out, slot_of, row_of, self.job_queued, self.words_of, several=self.tokens > 1,
            pairs=self.pairs, pair_lanes=_lanes(self.pairs), loads=loads, load_lanes=_lanes(loads),
            **self._shared, num_warps=1,
        )  # fmt: skip

    def fetch(self, layer: int, out: Outputs) -> None:
        """Copy what an event still misses."""
        progress = self.state.progress[layer % (self.state.distances + 1)]
        self.gather(layer, out.loads, out.missing, out.job_row, Prefetched(self.job_queued, progress))

    def targets(self, layer: int) -> int:
        """How many of the layers ahead there are."""
        return min(self.state.distances, self.layers - 1 - layer)

    def pick(self, layer: int, scores: Sequence[Tensor]) -> None:
        """Queue experts: scores ([tokens, experts] of each layer ahead, the nearest first) say which are likely.

        An expert that cannot be chosen at all has minus infinity.
        """
        if len(scores) != self.targets(layer):
            raise ValueError(f"after layer {layer} there are {self.targets(layer)} to prefetch for, not {len(scores)}")
        if any(each.numel() != self.tokens * self.experts or not each.is_contiguous() for each in scores):
            raise ValueError(f"scores are of {self.tokens} tokens and {self.experts} experts, side by side")
        if scores:
            launch: Any = pick[(1,)]
            launch(
                tuple(scores), layer, self.state, self.words_of, count=len(scores), tokens=self.tokens,
                min_probability=self.plan.min_probability, **self._shared,
                num_warps=4 if self.experts <= 256 else 8,
            )  # fmt: skip

    def send(self, layer: int) -> None:
        """Copy what is queued for the layers ahead until the next is planned."""
        if count := self.targets(layer):
            launch: Any = send[(self.gather.prefetch.programs,)]
            launch(
                self.gather.host, self.gather.rows, self.gather.host_row_of, self.state, layer, self.words_of,
                self.gather.slot_words, count=count, **self._copied, num_warps=self.gather.prefetch.warps,
            )  # fmt: skip

    def tallies(self) -> PrefetchCounts:
        """What came of prefetches so far; waits for the device."""
        return PrefetchCounts(*self.state.tallies.tolist())


def _lanes(count: int) -> int:
    """The length of a vector that holds so many."""
    found: int = max(triton.next_power_of_2(count), 2)
    return found
