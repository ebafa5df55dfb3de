"""What the device writes down of the steps that it serves, and where the host reads it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hotset.engine.device.plan import Outputs
from hotset.engine.device.variant import Variant, lookahead_key
from hotset.engine.host.prefetcher import PrefetchCounts

Tensor = torch.Tensor
Rows = npt.NDArray[np.int16]

RING = 64
"""Steps that the log holds; the host reads it after every one."""


class RecordBuffers(NamedTuple):
    """What a recording wants of the last steps, beside the experts: on the device, and where the host reads it."""

    weights: Tensor  # float16 [ring, layers, tokens, top_k]
    read_weights: Tensor
    predicted: Tensor | None  # int16 [ring, layers, tokens, distances, width], the next layers' routers predict
    read_predicted: Tensor | None

    def send(self) -> None:
        """Copy all to where the host reads it: part of the graph."""
        self.read_weights.copy_(self.weights, non_blocking=True)
        if self.predicted is not None and self.read_predicted is not None:
            self.read_predicted.copy_(self.predicted, non_blocking=True)

    def at(self, place: int, layer: int) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.int64] | None]:
        """What one layer of one step had."""
        predicted = None if self.read_predicted is None else self.read_predicted[place, layer].numpy().astype(np.int64)
        return self.read_weights[place, layer].numpy(), predicted


class StepLog:
    """The log of the steps of one size. What is marked as part of the graph is captured; the rest is the host's."""

    def __init__(self, out: Outputs, tokens: int, prefetch_tallies: Tensor | None) -> None:
        device, self.tokens = out.log.device, tokens
        self._layers, self._top_k = out.log.shape[1], out.log.shape[2] // tokens
        self._on_gpu = device.type == "cuda"
        self._out, self._device_tallies = out, prefetch_tallies
        self._at = torch.zeros(1, dtype=torch.int64, device=device)  # where in all rings the step is
        self._records: dict[Any, RecordBuffers] = {}
        # When each layer had computed what was there, and when the rest had come; the host may read a newer step.
        self.stamps = torch.zeros((self._layers, 2), dtype=torch.int64, device=device)
        self._read_stamps = torch.zeros((self._layers, 2), dtype=torch.int64, pin_memory=self._on_gpu)
        self._deltas = torch.zeros(len(fields(PrefetchCounts)), dtype=torch.int64, pin_memory=self._on_gpu)
        self._log = torch.empty_like(out.log, device="cpu", pin_memory=self._on_gpu)
        self._launched = 0

    def begin(self, variant: Variant) -> None:
        """Number a step: part of the graph."""
        self._out.step.add_(1)
        if variant.recording:
            torch.remainder(self._out.step, RING, out=self._at)

    def keep(self, variant: Variant, layer: int, hidden: Tensor, weights: Tensor) -> None:
        """Keep what a recording wants to know beside the experts: part of the graph."""
        predicted = None if variant.lookahead is None else variant.lookahead(layer, hidden)
        key = lookahead_key(variant.lookahead)
        if key not in self._records:  # made in the runs before a capture
            self._records[key] = self._make_buffers(predicted)
        buffers = self._records[key]
        row = weights.detach().to(torch.float16).reshape(1, self.tokens, -1)
        buffers.weights[:, layer].index_copy_(0, self._at, row)
        if predicted is not None and buffers.predicted is not None:
            buffers.predicted[:, layer].index_copy_(0, self._at, predicted.to(torch.int16).unsqueeze(0))

    def _make_buffers(self, predicted: Tensor | None) -> RecordBuffers:
        def ring(shape: tuple[int, ...], kind: torch.dtype) -> tuple[Tensor, Tensor]:
            mine = torch.zeros((RING, self._layers, *shape), dtype=kind, device=self._at.device)
            return mine, torch.zeros_like(mine, device="cpu", pin_memory=self._on_gpu)

        with torch.inference_mode(False):
            weights = ring((self.tokens, self._top_k), torch.float16)
            rest = (None, None) if predicted is None else ring(tuple(predicted.shape), torch.int16)
            return RecordBuffers(*weights, *rest)

    def send(self, variant: Variant) -> None:
        """Copy the log to where the host can read it: part of the graph."""
        self._log.copy_(self._out.log, non_blocking=True)
        self._read_stamps.copy_(self.stamps, non_blocking=True)
        if variant.prefetch and self._device_tallies is not None:
            self._deltas.copy_(self._device_tallies, non_blocking=True)
        if variant.recording:
            self._records[lookahead_key(variant.lookahead)].send()

    def restart(self) -> None:
        """Begin to number steps anew, after those that only warmed up."""
        self._out.step.zero_()
        self._launched = 0

    def note_launch(self) -> int:
        """Count a step that was given to the device; returns its number."""
        self._launched += 1
        return self._launched

    def has_unread(self) -> bool:
        """Whether the device has begun a step that was not counted; waits for the device."""
        return int(self._out.step) > self._launched

    def routed(self, number: int) -> Rows:
        """The expert of each pair of every layer ([layers, pairs], or -1) in a step that is over."""
        found: Rows = self._log[number % RING].numpy()
        return found

    def stalled_s(self) -> npt.NDArray[np.float64]:
        """How long each layer had nothing to compute in the last step that is over, or in a newer one."""
        found: npt.NDArray[np.float64] = np.diff(self._read_stamps.numpy(), axis=1)[:, 0] / 1e9
        return found

    def recorded(
        self, number: int, layer: int, variant: Variant
    ) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.int64] | None]:
        """The weights of one layer in a step that is over, and what the next layers' routers predicted."""
        return self._records[lookahead_key(variant.lookahead)].at(number % RING, layer)

    def tallies(self) -> PrefetchCounts:
        """What had come of prefetches by the end of the last step that is over, or a little later."""
        return PrefetchCounts(*self._deltas.tolist())
