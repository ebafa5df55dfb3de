"""The kernels of one decode step: plan an event, fetch what is missing and compute it, without asking the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hotset.cache.controller import Controller
from hotset.engine.arena import Arena
from hotset.engine.device.gather import Gather
from hotset.engine.device.log import RING, StepLog
from hotset.engine.device.plan import Plan
from hotset.engine.device.prefetch import DevicePrefetch
from hotset.engine.device.state import DeviceCacheState
from hotset.engine.device.variant import Predict, Variant
from hotset.engine.kernels.spec import ExpertSpec
from hotset.engine.kernels.triton_experts import Phase, TritonExperts
from hotset.engine.support import DeviceSupport
from hotset.errors import HotsetError
from hotset.prefetch import PrefetchPlan
from hotset.store import Catalog

Tensor = torch.Tensor


class StepKernels:
    """The kernels for steps of so many tokens. All that they do to the cache, they do to its state on the device."""

    def __init__(
        self,
        tokens: int,
        state: DeviceCacheState,
        plan: Plan,
        experts: Sequence[TritonExperts],
        gather: Gather,
        prefetch: DevicePrefetch | None,
        predict: Predict | None,
    ) -> None:
        self.tokens, self.state, self.plan, self.predict = tokens, state, plan, predict
        self.experts, self.gather, self.prefetch = experts, gather, prefetch
        self.log = StepLog(plan.out, tokens, None if state.prefetch is None else state.prefetch.tallies)
        self.device = state.host_row_of.device
        cuda: Any = torch.cuda
        on_gpu = self.device.type == "cuda"
        self._copies: Any = cuda.Stream(self.device) if on_gpu else None
        self._predictions: Any = cuda.Stream(self.device) if on_gpu else None
        self._tuned: set[int] = set()  # layers whose kernels were chosen and compiled
        num_experts = state.host_row_of.shape[1]
        self._no_expert = torch.full((len(plan.out.pair_row),), num_experts, dtype=torch.int64, device=self.device)

    def another_stream(self) -> Any:
        """A stream of the device that is none of those used here: torch hands out the same ones in turns."""
        cuda: Any = torch.cuda
        taken = {stream.cuda_stream for stream in (self._copies, self._predictions)}
        while True:
            found = cuda.Stream(self.device)
            if found.cuda_stream not in taken:
                return found

    def warm_up(self, variant: Variant, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Choose and compile all kernels of a layer on an event without experts, so that nothing changes."""
        if layer not in self._tuned:
            self._tuned.add(layer)
            self.experts[layer].warm_up(self.tokens, weights.dtype)
        return self.emit(variant, layer, hidden, self._no_expert.view_as(index), weights)

    def emit(self, variant: Variant, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The output of one layer's experts; kernels only, nothing that the host would have to wait for."""
        if variant.recording:
            self.log.keep(variant, layer, hidden, weights)
        out, experts, result = self.plan.out, self.experts[layer], torch.empty_like(hidden)
        index = index.reshape(-1)
        self.plan(layer, index)
        if variant.resident:  # the early phase does all there is; its stamp says that nothing waited
            stamp = None if self._copies is None else self.log.stamps[layer]
            experts(hidden, out.pair_row, out.pair_late, weights, result, Phase.EARLY, stamp)
            return result
        prefetch = self.prefetch if variant.prefetch else None
        scores = self._scores(prefetch, layer, hidden)  # not beside the planning, which it would slow down
        if self._copies is None:
            self._claim(prefetch, layer, index)
            self._copy(prefetch, layer)
            experts(hidden, out.pair_row, out.pair_late, weights, result)
            if prefetch is not None and scores:
                prefetch.pick(layer, scores)
                prefetch.send(layer)
            return result
        now: Any = torch.cuda.current_stream()
        fetched = self._fetch_beside(now, prefetch, layer, index, scores)
        stamp = self.log.stamps[layer]
        experts(hidden, out.pair_row, out.pair_late, weights, result, Phase.EARLY, stamp)
        now.wait_event(fetched)
        experts(hidden, out.pair_row, out.pair_late, weights, result, Phase.LATE, stamp)
        return result

    def _scores(self, prefetch: DevicePrefetch | None, layer: int, hidden: Tensor) -> list[Tensor]:
        """What the routers of the next layers make of this one's input, beside whatever is fetched for it."""
        targets = 0 if prefetch is None else prefetch.targets(layer)  # the last layer has none
        if not targets or self.predict is None:
            return []
        if self._predictions is None:
            return self.predict(layer, hidden, targets)
        self._predictions.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._predictions):
            hidden.record_stream(self._predictions)
            return self.predict(layer, hidden, targets)

    def _fetch_beside(
        self, now: Any, prefetch: DevicePrefetch | None, layer: int, index: Tensor, scores: list[Tensor]
    ) -> Any:
        """Copy beside the computation: demand, then predictions; returns what marks the end of demand."""
        copies, predictions = self._copies, self._predictions
        copies.wait_stream(now)
        with torch.cuda.stream(copies):
            claimed = self._claim(prefetch, layer, index)
            self._copy(prefetch, layer)
            fetched = copies.record_event()
        if scores and prefetch is not None:
            predictions.wait_event(claimed)
            with torch.cuda.stream(predictions):
                prefetch.pick(layer, scores)
            copies.wait_stream(predictions)
            with torch.cuda.stream(copies):
                prefetch.send(layer)
        return fetched

    def _claim(self, prefetch: DevicePrefetch | None, layer: int, index: Tensor) -> Any:
        """Let an event have what was prefetched for it; returns what marks the end of that."""
        if prefetch is None:
            return None
        prefetch.claim(layer, self.plan.out, self.state.table.table.slot_of, self.state.row_of, index)
        return None if self._copies is None else self._copies.record_event()

    def _copy(self, prefetch: DevicePrefetch | None, layer: int) -> None:
        """Copy what an event misses, or what prefetch has left of it."""
        out = self.plan.out
        if prefetch is None:
            self.gather(layer, out.loads, out.missing, out.job_row)
        else:
            prefetch.fetch(layer, out)

    def restart(self) -> None:
        """Forget the steps that only warmed up."""
        self.log.restart()
        if self.state.prefetch is not None:
            self.state.prefetch.drop()


class StepParts(NamedTuple):
    """What the kernels of a step are made of beside the cache: the experts, and the memory that they lie in."""

    catalog: Catalog
    specs: Sequence[ExpertSpec]
    arena: Arena  # the rows
    host_arena: Arena  # all experts
    prefetch: PrefetchPlan  # by which rules experts are prefetched
    predict: Predict | None = None  # what the routers of the next layers make of a layer's input


def make_step_kernels(tokens: int, state: DeviceCacheState, controller: Controller, parts: StepParts) -> StepKernels:
    """The kernels for steps of so many tokens of one cache."""
    catalog, specs, arena, host_arena, rules, predict = parts
    shape, plan, prefetch = controller.plan.shape, controller.plan, state.prefetch
    reasons = DeviceSupport.check_batch(tokens, shape, plan.staging, controller.policy)
    if reasons:
        raise HotsetError(reasons[0])
    stop = None if prefetch is None else prefetch.stop
    planned = Plan(
        controller, state.table, tokens * shape.top_k, state.row_of, plan.cached, ring=RING, stop=stop,
        staging=state.staging if state.lists_staging else None,
    )  # fmt: skip
    used = [source.layout.used_bytes for source in catalog.layers]
    gather = Gather(host_arena.memory, arena.memory, catalog.slot_bytes, used, state.host_row_of)
    prefetching = prefetch and DevicePrefetch(prefetch, rules, gather, tokens=tokens, top_k=shape.top_k)
    experts: list[TritonExperts] = []
    for source, spec in zip(catalog.layers, specs, strict=True):
        scratch = experts[-1].scratch if experts else None  # of all layers, since one computes at a time
        kernels = TritonExperts(arena, source.layout, spec, top_k=shape.top_k, max_tokens=tokens, scratch=scratch)
        experts.append(kernels)
    return StepKernels(tokens, state, planned, experts, gather, prefetching, predict)
