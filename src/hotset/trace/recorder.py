"""Records the routing of a live run: rows are gathered layer by layer and become a Trace at the end."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotset.errors import TraceError
from hotset.shape import ModelShape
from hotset.trace.event import Phase
from hotset.trace.trace import NONE, Labels, Trace

_NUMBERS = itertools.count(1)


@dataclass
class Block:
    """The tokens of one step, or of the part of a step that has as many tokens: an encoder's, then a decoder's."""

    place: tuple[int, int]  # the number of the step, and of the part
    experts: npt.NDArray[np.int16]  # [tokens, layers, top_k]
    weights: npt.NDArray[np.float16]
    request: npt.NDArray[np.int32]
    phase: Phase
    token_ids: npt.NDArray[np.int32] | None
    predictions: npt.NDArray[np.int16] | None = None  # [tokens, layers, distances, width]
    seen: set[int] = field(default_factory=set)


class Recorder:
    """Gathers what every layer routed in steps that may be under way side by side; `finish` turns it into a trace.

    A block is kept once it has all layers, or its step has ended: what was broken off leaves no rows with holes.
    """

    def __init__(self, shape: ModelShape, meta: dict[str, str] | None = None) -> None:
        self.shape = shape
        self.meta = meta or {}
        self.number = next(_NUMBERS)  # which recording this is, of all in the process
        self.blocks: list[Block] = []
        self._open: dict[int, list[Block]] = {}  # by the number of the step
        self._dropped: set[int] = set()

    def note(
        self,
        number: int,
        layer: int,
        index: npt.NDArray[np.int64],
        weights: npt.NDArray[np.float16],
        request: npt.NDArray[np.int32],
        phase: Phase,
        token_ids: npt.NDArray[np.int32] | None = None,
        predictions: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Take in what one layer routed in the step of this number: index and weights are [tokens, top_k].

        Predictions are [tokens, distances, width]: what the routers of the next layers make of this layer's input.
        """
        if number in self._dropped:
            return
        parts = self._open.setdefault(number, [])
        block = parts[-1] if parts else None
        if block is None or layer in block.seen or len(block.experts) != len(index):
            ids = token_ids if token_ids is not None and len(token_ids) == len(index) else None
            size = (len(index), self.shape.layers, self.shape.top_k)
            experts, zeros = np.full(size, NONE, np.int16), np.zeros(size, np.float16)
            block = Block((number, len(parts)), experts, zeros, request, phase, ids)
            parts.append(block)
        width = index.shape[1]
        if width > self.shape.top_k:
            raise TraceError(
                f"layer {layer} routes to {width} experts, and the model is taken to use {self.shape.top_k}"
            )
        block.experts[:, layer, :width] = np.where(index < self.shape.experts, index, NONE)
        block.weights[:, layer, :width] = weights
        if predictions is not None:
            self._keep_predictions(block, layer, predictions)
        block.seen.add(layer)
        if len(block.seen) == self.shape.layers:
            self.blocks.append(block)

    def _keep_predictions(self, block: Block, layer: int, predictions: npt.NDArray[np.int64]) -> None:
        """Keep predictions with the layers that they are of."""
        tokens, distances, width = predictions.shape
        if block.predictions is None:
            block.predictions = np.full((tokens, self.shape.layers, distances, width), NONE, np.int16)
        for distance in range(min(distances, self.shape.layers - 1 - layer)):
            block.predictions[:, layer + 1 + distance, distance] = predictions[:, distance]

    def end(self, number: int) -> None:
        """End the step of this number: layers that it has not called used no experts."""
        self.blocks += [block for block in self._open.pop(number, []) if len(block.seen) < self.shape.layers]
        self._dropped.discard(number)

    def abandon(self, number: int) -> None:
        """Drop the step of this number, which was broken off."""
        self._open.pop(number, None)
        self._dropped.discard(number)

    def drop_incomplete(self) -> None:
        """Forget the steps that are not over: they were broken off, or will be too late."""
        self._dropped.update(self._open)
        self._open.clear()

    def mark(self) -> int:
        """This moment, for `rows_since` and `forget_since`."""
        return len(self.blocks)

    def rows_since(self, mark: int) -> list[int]:
        """The rows of each block that was completed since a moment."""
        return [len(block.experts) for block in self.blocks[mark:]]

    def forget_since(self, mark: int) -> None:
        """Forget the blocks that were completed since a moment."""
        del self.blocks[mark:]

    @property
    def tokens(self) -> int:
        """The tokens recorded so far."""
        return sum(len(block.experts) for block in self.blocks)

    def finish(self, labels: Labels = ()) -> Trace:
        """All that was recorded, as a trace."""
        if not self.blocks:
            raise TraceError("nothing was recorded: run the model between the start and the end of the recording")
        blocks = sorted(self.blocks, key=lambda block: block.place)
        ids = [block.token_ids for block in blocks]
        predictions = [block.predictions for block in blocks if block.predictions is not None]
        lengths = [len(block.experts) for block in blocks]
        requests, request = np.unique(np.concatenate([block.request for block in blocks]), return_inverse=True)
        if labels and len(labels) != len(requests):
            raise TraceError(f"{len(labels)} labels for {len(requests)} requests: give one for each, or none")
        return Trace(
            shape=self.shape,
            experts=np.concatenate([block.experts for block in blocks]),
            request=request.astype(np.int32),
            step=np.repeat(np.arange(len(blocks)), lengths).astype(np.int32),
            phase=np.repeat([int(block.phase) for block in blocks], lengths).astype(np.uint8),
            weights=np.concatenate([block.weights for block in blocks]),
            token_ids=None if any(each is None for each in ids) else np.concatenate([i for i in ids if i is not None]),
            predictions=np.concatenate(predictions) if len(predictions) == len(blocks) else None,
            labels=labels,
            meta=self.meta,
        )

    def save(self, path: Path, labels: Labels = ()) -> Trace:
        """Write what was recorded, whole or not at all."""
        trace = self.finish(labels)
        trace.save(path)
        return trace
