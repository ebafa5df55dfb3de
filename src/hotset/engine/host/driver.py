"""Serves events from the host, on a CPU and on a GPU alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hotset.engine.batch import ExpertBatch
from hotset.engine.guard import STAGING, EventRecord, Guard
from hotset.engine.host.prefetcher import Prefetched, Prefetcher
from hotset.engine.kernels.base import ExpertKernels
from hotset.engine.slots import Placement, SlotCache
from hotset.engine.stats import EngineStats
from hotset.engine.step import Step
from hotset.store import Catalog
from hotset.trace import Phase
from hotset.transfer.mover import Fetch, Mover

Tensor = torch.Tensor
Work = Callable[[Sequence[int], Sequence[int]], None]
"""Computes with some experts of an event, and the rows of memory in which they lie."""


class HostDriver:
    """Looks up an event, moves what is missing into rows, and computes what is there meanwhile."""

    def __init__(
        self,
        cache: SlotCache,
        mover: Mover,
        kernels: Sequence[ExpertKernels],
        prefetcher: Prefetcher | None,
        catalog: Catalog,
        stats: EngineStats,
        guard: Guard,
    ) -> None:
        self.kernels = kernels
        self._cache, self._mover, self._prefetcher, self._catalog = cache, mover, prefetcher, catalog
        self._stats, self._guard = stats, guard
        self._experts = [len(layer.experts) for layer in catalog.layers]
        self._looped = [kernel.spec.looped for kernel in kernels]  # each row is a pair of token and expert there
        guard.before_repair(self._stop)

    def serve(self, step: Step, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The output of one layer's experts for hidden [tokens, width], index and weights [tokens, top_k]."""
        if not index.numel():
            return torch.zeros_like(hidden)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.serve(step, layer, hidden, index, weights)
        with self._guard.lock:
            self._guard.check()
            self._cache.reclaim()
            began = time.perf_counter()
            predicted = None if self._prefetcher is None else self._prefetcher.predict(step, layer, hidden)
            batch = ExpertBatch(hidden, index, weights, self._experts[layer], predicted)
            if len(batch.experts):
                record = EventRecord(layer, batch.experts, self._cache.slots_of(layer, batch.experts))
                self._guard.run(record, self._serve, step, batch, record)
            if self._looped[layer] and (rows := step.per_token(batch.tokens)) > 1:
                hidden, index, weights = hidden[::rows], index.view(-1, rows), weights.view(-1, rows)
            self._stats.record(step, layer, hidden, index, weights)
            output = batch.combine()
            self._stats.clock.experts_s += time.perf_counter() - began
            return output

    def _serve(self, step: Step, batch: ExpertBatch, record: EventRecord) -> None:
        """One event: look up, claim what was prefetched, then move what is missing while the rest is computed."""
        layer, prefetcher, stalled_s = record.layer, self._prefetcher, 0.0
        self._stats.begin_event(step, layer)
        tokens = batch.tokens // step.per_token(batch.tokens) if self._looped[layer] else batch.tokens
        who = batch.asking(step, tokens, routed=self._cache.controller.policy.needs_routes)
        placement = self._cache.look_up(layer, batch.experts, record.slots, batch.counts, *who)
        claimed = {} if prefetcher is None else prefetcher.claim(step, placement)
        if len(placement.loads):
            if self._stats.listener is not None:
                self._stats.listener(layer, placement.loads)
            stalled_s = self._fetch_and_compute(step, batch, placement, claimed, record)
        else:
            if prefetcher is not None:
                prefetcher.issue(step, layer, batch)
            self.kernels[layer].run(batch, batch.experts, placement.rows)
        self._cache.release()
        if prefetcher is not None:
            prefetcher.release(step, layer, stalled_s, claimed)

    def _fetch_and_compute(
        self, step: Step, batch: ExpertBatch, placement: Placement, claimed: dict[int, Prefetched], record: EventRecord
    ) -> float:
        """Start the transfers, compute what is there, then what arrives; returns how long the event stalled."""
        layer, rows = placement.layer, placement.rows
        kernels, everything = self.kernels[layer], np.arange(len(rows))
        transfer = self._mover.start(self._fetch_of(step, batch, placement, claimed))
        try:
            prefetched = transfer.all_started
            if prefetched:
                self._prefetch(step, layer, batch)
            ready = np.flatnonzero(~np.isin(batch.experts, transfer.awaited))
            record.arrived.update(expert for expert in claimed if expert not in transfer.awaited)
            if len(ready) and not transfer.is_short:
                kernels.run(batch, batch.experts[ready], rows[ready])
            while not transfer.done:
                arrived = transfer.wait_any()
                record.arrived.update(arrived)
                at = batch.positions(list(arrived))
                rows[at] = list(arrived.values())
                at = everything if transfer.is_short else np.sort(at)
                kernels.run(batch, batch.experts[at], rows[at])
                transfer.release(arrived)
                if transfer.all_started and not prefetched:
                    prefetched = True
                    self._prefetch(step, layer, batch)
        finally:
            self._stats.clock.loaded_bytes += transfer.moved_bytes
            self._stats.clock.stall_s += transfer.stalled_s
        return transfer.stalled_s

    def _fetch_of(self, step: Step, batch: ExpertBatch, placement: Placement, claimed: dict[int, Prefetched]) -> Fetch:
        missing = np.sort(placement.loads[:, 0])
        at = batch.positions(missing)
        return Fetch(
            placement.layer,
            missing.tolist(),
            placement.rows[at].tolist(),
            batch.counts[at].tolist(),
            step.phase,
            {expert: one.transfer for expert, one in claimed.items()},
            together=self.kernels[placement.layer].prefers_one_run(batch),
        )

    def _prefetch(self, step: Step, layer: int, batch: ExpertBatch) -> None:
        """Start transfers for the next layers, once all that this event needs is on its way."""
        if self._prefetcher is not None:
            self._prefetcher.issue(step, layer, batch)

    def check_usable(self) -> None:
        """Refuse a call that finds no experts any more, or came into another process by a fork."""
        self._guard.check_usable()

    def num_experts(self, layer: int) -> int:
        """How many experts a layer has."""
        return self._experts[layer]

    def serve_again(self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The output of one layer's experts for an event that was served before, past the policy."""
        if not index.numel():
            return torch.zeros_like(hidden)
        with torch.no_grad():
            batch = ExpertBatch(hidden, index, weights, self._experts[layer])

            def work(experts: Sequence[int], rows: Sequence[int]) -> None:
                order = np.argsort(experts)
                self.kernels[layer].run(batch, np.array(experts)[order], np.array(rows, np.int32)[order])

            if len(batch.experts):
                self.revisit(layer, batch, work)
            return batch.combine()

    def revisit(self, layer: int, batch: ExpertBatch, work: Work) -> None:
        """Compute with the experts of an event once more: with residents where they lie, with others in staging.

        The policy does not hear of it: no expert is admitted or evicted, and it is neither a hit nor a miss.
        """
        with self._guard.lock:
            self._guard.check()
            self._cache.reclaim()
            resident = self._cache.slots_of(layer, batch.experts) >= 0
            here, absent = batch.experts[resident], batch.experts[~resident]
            count, source = self._stats.clock.backward, self._catalog.layers[layer]
            count.events += 1
            count.resident += len(here)
            count.fetched += len(absent)
            count.fetched_bytes += sum(source.read_bytes(expert) for expert in absent.tolist())
            rows = self._cache.rows_of(layer, here).tolist()

            def through_staging() -> None:
                ones, nowhere = [1] * len(absent), [-1] * len(absent)
                fetch = Fetch(layer, absent.tolist(), nowhere, ones, Phase.PREFILL, timed=False)
                transfer = self._mover.start(fetch)
                if len(here):
                    work(here.tolist(), rows)
                while not transfer.done:
                    arrived = transfer.wait_any()
                    work(list(arrived), list(arrived.values()))
                    transfer.release(arrived)

            self._guard.run(STAGING, through_staging)

    def _stop(self) -> None:
        """After a failure: return once nothing is written to a row any more, and forget what was prefetched."""
        self._mover.stop()
        if self._prefetcher is not None:
            self._prefetcher.reset()
