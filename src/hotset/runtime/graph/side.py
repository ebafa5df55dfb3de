"""The device's side of the cache: plans an event, fetches what is missing and computes it, without asking the host.

The host keeps its own controller and catches up later: the device writes down what was routed, and the host serves the
same events again, in the same order, by the same rules. So statistics, profiles and recordings are the host's as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hotset.engine.kernels.triton_experts import Phase, TritonExperts
from hotset.errors import HotsetError
from hotset.runtime.graph.ahead import DeviceAhead
from hotset.runtime.graph.ahead_state import AheadState, Tallies
from hotset.runtime.graph.device_table import DeviceTable
from hotset.runtime.graph.gather import Gather
from hotset.runtime.graph.plan import Plan
from hotset.runtime.step import Step
from hotset.trace.recorder import Recorder

if TYPE_CHECKING:
    from hotset.runtime.graph.engine import GraphEngine

Tensor = torch.Tensor

Gate = Callable[[int, Tensor, int], list[Tensor]]
"""Scores of all experts ([tokens, experts], the nearest layer first) of a layer, its input and a number of layers."""
RING = 64
"""Passes that the log holds; the host reads it after every one."""


class Shared(NamedTuple):
    """What passes of all sizes share on the device."""

    table: DeviceTable
    row_of: Tensor  # int32 [slots], where each slot lies
    host_row_of: Tensor  # int32 [layers, experts], where each expert lies in the RAM tier
    ahead: AheadState | None
    gate: Gate | None  # what the routers of the next layers make of a layer's input


class Kept(NamedTuple):
    """What a recording wants of the last passes, beside the experts: on the device, and where the host reads it."""

    weights: Tensor  # float16 [ring, layers, tokens, top_k]
    read_weights: Tensor
    said: Tensor | None  # int16 [ring, layers, tokens, distances, width], what the routers ahead say
    read_said: Tensor | None

    def send(self) -> None:
        """Copy all to where the host reads it: part of the graph."""
        self.read_weights.copy_(self.weights, non_blocking=True)
        if self.said is not None and self.read_said is not None:
            self.read_said.copy_(self.said, non_blocking=True)

    def at(self, place: int, layer: int) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.int64] | None]:
        """What one layer of one pass had."""
        said = None if self.read_said is None else self.read_said[place, layer].numpy().astype(np.int64)
        return self.read_weights[place, layer].numpy(), said


def gate_key(gate: Any) -> Any:
    """What tells gates of one model apart that a recording asks: how far and how wide they look."""
    return tuple(sorted(gate.keywords.items())) if isinstance(gate, partial) else gate


class DeviceSide:
    """The kernels for passes of one size, and what they share with those of others."""

    def __init__(self, engine: GraphEngine, shared: Shared, tokens: int) -> None:
        self.engine, self.shared, self.tokens = engine, shared, tokens
        shape, plan, state = engine.shape, engine.controller.plan, shared.ahead
        self.pairs = tokens * shape.top_k
        if plan.staging < min(self.pairs, shape.experts):
            raise HotsetError(
                f"an event of {tokens} tokens may need {min(self.pairs, shape.experts)} staging slots, and there are "
                f"{plan.staging}"
            )
        stop = None if state is None else state.stop
        self.plan = Plan(engine.controller, shared.table, self.pairs, shared.row_of, plan.cached, ring=RING, stop=stop)
        memory = engine.host.arena.memory, engine.arena.memory, engine.catalog.slot_bytes
        used = [source.layout.used_bytes for source in engine.catalog.layers]
        self.gather = Gather(*memory, used, shared.host_row_of)
        self.ahead = state and DeviceAhead(state, *memory, used, shared.host_row_of, tokens=tokens, top_k=shape.top_k)
        self.kernels = self._make_kernels()
        cuda: Any = torch.cuda
        on_gpu = engine.device.type == "cuda"
        self._copies: Any = cuda.Stream(engine.device) if on_gpu else None
        self._looks: Any = cuda.Stream(engine.device) if on_gpu else None
        self.guessing = False  # whether what is captured now has guesses
        self.recording = False  # whether it keeps what a recording wants
        self._at = torch.zeros(1, dtype=torch.int64, device=engine.device)  # where in all rings the pass is
        self._kept: dict[Any, Kept] = {}
        # When each layer had computed what was there, and when the rest had come; the host may read a newer pass.
        self._stamps = torch.zeros((shape.layers, 2), dtype=torch.int64, device=engine.device)
        self._read_stamps = torch.zeros((shape.layers, 2), dtype=torch.int64, pin_memory=on_gpu)
        self._tallies = torch.zeros(len(Tallies._fields), dtype=torch.int64, pin_memory=on_gpu)
        self._log = torch.empty_like(self.plan.out.log, device="cpu", pin_memory=engine.device.type == "cuda")
        self.launched = 0  # passes that were given to the device
        self._tuned: set[int] = set()  # layers whose kernels were chosen and compiled, in the runs before a capture
        self._ones = np.ones(shape.top_k, np.int32)
        self._nobody = torch.full((self.pairs,), shape.experts, dtype=torch.int64, device=engine.device)

    def another_stream(self) -> Any:
        """A stream of the device that is none of those used here: torch hands out the same ones in turns."""
        cuda: Any = torch.cuda
        taken = {stream.cuda_stream for stream in (self._copies, self._looks)}
        while True:
            found = cuda.Stream(self.engine.device)
            if found.cuda_stream not in taken:
                return found

    def _make_kernels(self) -> list[TritonExperts]:
        engine, scratch = self.engine, None
        kernels: list[TritonExperts] = []
        for source, local in zip(engine.catalog.layers, engine.layers, strict=True):
            one = TritonExperts(
                engine.arena, source.layout, local.spec, top_k=engine.shape.top_k,
                most_tokens=self.tokens, scratch=scratch,
            )  # fmt: skip
            scratch = one.scratch
            kernels.append(one)
        return kernels

    def begin(self) -> None:
        """Begin a pass: part of the graph."""
        self.plan.out.step.add_(1)
        if self.recording:
            torch.remainder(self.plan.out.step, RING, out=self._at)

    def keep(self, layer: int, hidden: Tensor, weights: Tensor) -> None:
        """Keep what a recording wants to know beside the experts: part of the graph."""
        gate = self.engine.gate
        said = None if gate is None else gate(layer, hidden)
        kept = self._kept.get(gate_key(gate))
        if kept is None:  # made in the runs before a capture
            kept = self._kept[gate_key(gate)] = self._make_kept(said)
        kept.weights[:, layer].index_copy_(0, self._at, weights.detach().to(torch.float16).reshape(1, self.tokens, -1))
        if said is not None and kept.said is not None:
            kept.said[:, layer].index_copy_(0, self._at, said.to(torch.int16).unsqueeze(0))

    def _make_kept(self, said: Tensor | None) -> Kept:
        on_gpu, front = self.engine.device.type == "cuda", (RING, self.engine.shape.layers)

        def ring(shape: tuple[int, ...], kind: torch.dtype) -> tuple[Tensor, Tensor]:
            mine = torch.zeros(front + shape, dtype=kind, device=self.engine.device)
            return mine, torch.zeros_like(mine, device="cpu", pin_memory=on_gpu)

        with torch.inference_mode(False):
            weights = ring((self.tokens, self.engine.shape.top_k), torch.float16)
            return Kept(*weights, *((None, None) if said is None else ring(tuple(said.shape), torch.int16)))

    def rehearse(self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Choose and compile all kernels of a layer on an event that asks for nobody, so that nothing changes."""
        if layer not in self._tuned:
            self._tuned.add(layer)
            self.kernels[layer].warm_up(self.tokens, weights.dtype)
        return self.serve(layer, hidden, self._nobody.view_as(index), weights)

    def serve(self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The output of one layer's experts; kernels only, nothing that the host would have to wait for."""
        out, kernels, result = self.plan.out, self.kernels[layer], torch.empty_like(hidden)
        index = index.reshape(-1)
        self.plan(layer, index)
        scores = self._look(layer, hidden)  # not beside the planning, which it would slow down
        if self._copies is None:
            self._fetch(layer, index)
            kernels(hidden, out.pair_row, out.pair_late, weights, result)
            self._guess(layer, scores)
            return result
        now: Any = torch.cuda.current_stream()
        fetched = self._fetch_beside(now, layer, index, scores)
        stamp = self._stamps[layer]
        kernels(hidden, out.pair_row, out.pair_late, weights, result, Phase.EARLY, stamp)
        now.wait_event(fetched)
        kernels(hidden, out.pair_row, out.pair_late, weights, result, Phase.LATE, stamp)
        return result

    def _look(self, layer: int, hidden: Tensor) -> list[Tensor]:
        """What the routers of the next layers make of this one's input, beside whatever is fetched for it."""
        targets = 0 if self.ahead is None or not self.guessing else self.ahead.targets(layer)
        if not targets or self.shared.gate is None:
            return []
        if self._looks is None:
            return self.shared.gate(layer, hidden, targets)
        self._looks.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._looks):
            hidden.record_stream(self._looks)
            return self.shared.gate(layer, hidden, targets)

    def _fetch_beside(self, now: Any, layer: int, index: Tensor, scores: list[Tensor]) -> Any:
        """Copy beside the arithmetic: demand, then guesses; returns what marks the end of demand."""
        copies, looks = self._copies, self._looks
        copies.wait_stream(now)
        with torch.cuda.stream(copies):
            claimed = self._take_over(layer, index)
            self._copy(layer)
            fetched = copies.record_event()
        if scores and self.ahead is not None:
            looks.wait_event(claimed)
            with torch.cuda.stream(looks):
                self.ahead.pick(layer, scores)
            copies.wait_stream(looks)
            with torch.cuda.stream(copies):
                self.ahead.send(layer)
        return fetched

    def _fetch(self, layer: int, index: Tensor) -> None:
        self._take_over(layer, index)
        self._copy(layer)

    def _take_over(self, layer: int, index: Tensor) -> Any:
        """Let an event have what was guessed for it; returns what marks the end of that."""
        if self.ahead is None or not self.guessing:
            return None
        self.ahead.take_over(layer, self.plan.out, self.shared.table.table.slot_of, self.shared.row_of, index)
        return None if self._copies is None else self._copies.record_event()

    def _copy(self, layer: int) -> None:
        out = self.plan.out
        if self.ahead is None or not self.guessing:
            self.gather(layer, out.loads, out.missing, out.job_row)
        else:
            self.ahead.fetch(layer, out)

    def _guess(self, layer: int, scores: list[Tensor]) -> None:
        """Send for what the next layers' routers make of this layer's input; the last layer has none."""
        if scores and self.ahead is not None:
            self.ahead.pick(layer, scores)
            self.ahead.send(layer)

    def finish(self) -> None:
        """End a pass: part of the graph; the log goes to where the host can read it."""
        self._log.copy_(self.plan.out.log, non_blocking=True)
        self._read_stamps.copy_(self._stamps, non_blocking=True)
        if self.guessing and self.shared.ahead is not None:
            self._tallies.copy_(self.shared.ahead.tallies, non_blocking=True)
        if self.recording:
            self._kept[gate_key(self.engine.gate)].send()

    def forget(self) -> None:
        """Begin to count passes anew, after those that only warmed up."""
        self.plan.out.step.zero_()
        self.launched = 0
        if self.shared.ahead is not None:
            self.shared.ahead.drop()

    def is_unread(self) -> bool:
        """Whether the device has begun a pass that was not read; waits for the device."""
        return int(self.plan.out.step) > self.launched

    @property
    def tallies(self) -> list[int]:
        """What had come of guesses by the end of the last pass that is over, or a little later."""
        found: list[int] = self._tallies.tolist()
        return found

    def read(self, number: int, step: Step, recorder: Recorder | None = None) -> int:
        """Serve on the host a step, the pass of this number among those of this side, and record it; it must be over.

        Returns how many experts it missed.
        """
        missed = 0
        engine, rows = self.engine, self._log[number % RING].numpy()
        waited_s = np.diff(self._read_stamps.numpy(), axis=1)[:, 0] / 1e9
        for layer, row in enumerate(rows):
            if recorder is not None:
                self._record(recorder, number, step, layer, row)
            experts, counts = self._counted(row)
            if len(experts):
                engine.serve_request(step.first_request, layer)
                missing = engine.controller.route(layer, experts, counts, self.tokens, step.phase, step.first_request)
                if missing and engine.listener is not None:
                    engine.listener(layer, engine.controller.table.loads[:missing].copy())
                engine.clock.loaded_bytes += missing * engine.catalog.layers[layer].layout.used_bytes
                engine.clock.stall_s += max(float(waited_s[layer]), 0.0) if missing else 0.0
                missed += missing
        return missed

    def _record(self, recorder: Recorder, number: int, step: Step, layer: int, row: npt.NDArray[np.int16]) -> None:
        weights, said = self._kept[gate_key(self.engine.gate)].at(number % RING, layer)
        index = row.astype(np.int64).reshape(self.tokens, -1)
        request = step.requests(self.tokens)
        recorder.note(step.number, layer, index, weights, request, step.phase, step.token_ids, said)

    def _counted(self, row: npt.NDArray[np.int16]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The experts of an event in rising order, and how many tokens use each; one token uses each once."""
        if self.tokens == 1:
            experts = np.sort(row[row >= 0]).astype(np.int32)
            return experts, self._ones[: len(experts)]
        found, counts = np.unique(row[row >= 0], return_counts=True)
        return found.astype(np.int32), counts.astype(np.int32)
