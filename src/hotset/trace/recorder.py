"""Records the routing of a live run: rows are gathered layer by layer and become a Trace at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotset.errors import TraceError
from hotset.shape import ModelShape
from hotset.trace.event import Phase
from hotset.trace.trace import NONE, Labels, Trace


@dataclass
class Block:
    """The tokens of one pass, or of the part of a pass that has as many tokens: an encoder's, then a decoder's."""

    experts: npt.NDArray[np.int16]  # [tokens, layers, top_k]
    weights: npt.NDArray[np.float16]
    request: npt.NDArray[np.int32]
    phase: Phase
    token_ids: npt.NDArray[np.int32] | None
    guesses: npt.NDArray[np.int16] | None = None  # [tokens, layers, distances, width]
    seen: set[int] = field(default_factory=set)


class Recorder:
    """Gathers what every layer routed; `finish` turns it into a trace."""

    def __init__(self, shape: ModelShape, meta: dict[str, str] | None = None) -> None:
        self.shape = shape
        self.meta = meta or {}
        self.blocks: list[Block] = []
        self._pass = -1

    def note(
        self,
        number: int,
        layer: int,
        index: npt.NDArray[np.int64],
        weights: npt.NDArray[np.float16],
        request: npt.NDArray[np.int32],
        phase: Phase,
        token_ids: npt.NDArray[np.int32] | None = None,
        guesses: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Take in what one layer routed in the pass of this number: index and weights are [tokens, top_k].

        Guesses are [tokens, distances, width]: what the routers of the next layers make of this layer's input.
        """
        block = self.blocks[-1] if self.blocks and number == self._pass else None
        if block is None or layer in block.seen or len(block.experts) != len(index):
            ids = token_ids if token_ids is not None and len(token_ids) == len(index) else None
            block = self._begin(len(index), request, phase, ids)
        self._pass = number
        block.seen.add(layer)
        width = index.shape[1]
        if width > self.shape.top_k:
            raise TraceError(
                f"layer {layer} routes to {width} experts, and the model is taken to use {self.shape.top_k}"
            )
        block.experts[:, layer, :width] = np.where(index < self.shape.experts, index, NONE)
        block.weights[:, layer, :width] = weights
        if guesses is not None:
            self._keep_guesses(block, layer, guesses)

    def _keep_guesses(self, block: Block, layer: int, guesses: npt.NDArray[np.int64]) -> None:
        """Lay guesses down with the layers that they are of."""
        tokens, distances, width = guesses.shape
        if block.guesses is None:
            block.guesses = np.full((tokens, self.shape.layers, distances, width), NONE, np.int16)
        for distance in range(min(distances, self.shape.layers - 1 - layer)):
            block.guesses[:, layer + 1 + distance, distance] = guesses[:, distance]

    def _begin(
        self, tokens: int, request: npt.NDArray[np.int32], phase: Phase, ids: npt.NDArray[np.int32] | None
    ) -> Block:
        layers, top_k = self.shape.layers, self.shape.top_k
        block = Block(
            np.full((tokens, layers, top_k), NONE, np.int16),
            np.zeros((tokens, layers, top_k), np.float16),
            request,
            phase,
            ids,
        )
        self.blocks.append(block)
        return block

    def drop_incomplete(self) -> None:
        """Forget a last pass that was broken off before its last layer."""
        whole = max((len(block.seen) for block in self.blocks[:-1]), default=self.shape.layers)
        if self.blocks and len(self.blocks[-1].seen) < whole:
            del self.blocks[-1]

    @property
    def tokens(self) -> int:
        """The tokens recorded so far."""
        return sum(len(block.experts) for block in self.blocks)

    def finish(self, labels: Labels = ()) -> Trace:
        """All that was recorded, as a trace."""
        if not self.blocks:
            raise TraceError("nothing was recorded: run the model between the start and the end of the recording")
        ids = [block.token_ids for block in self.blocks]
        guesses = [block.guesses for block in self.blocks if block.guesses is not None]
        lengths = [len(block.experts) for block in self.blocks]
        requests, request = np.unique(np.concatenate([block.request for block in self.blocks]), return_inverse=True)
        if labels and len(labels) != len(requests):
            raise TraceError(f"{len(labels)} labels for {len(requests)} requests: give one for each, or none")
        return Trace(
            shape=self.shape,
            experts=np.concatenate([block.experts for block in self.blocks]),
            request=request.astype(np.int32),
            step=np.repeat(np.arange(len(self.blocks)), lengths).astype(np.int32),
            phase=np.repeat([int(block.phase) for block in self.blocks], lengths).astype(np.uint8),
            weights=np.concatenate([block.weights for block in self.blocks]),
            token_ids=None if any(each is None for each in ids) else np.concatenate([i for i in ids if i is not None]),
            guesses=np.concatenate(guesses) if len(guesses) == len(self.blocks) else None,
            labels=labels,
            meta=self.meta,
        )

    def save(self, path: Path, labels: Labels = ()) -> Trace:
        """Write what was recorded, whole or not at all."""
        trace = self.finish(labels)
        trace.save(path)
        return trace
