"""Second moments of what goes into the products of experts: by them an error in a weight counts as much as it shows.

They are sums over tokens, so that they can be collected pass by pass and kept between two runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch

from hotset.engine.arena import Arena
from hotset.engine.batch import IntArray
from hotset.engine.kernels import ExpertKernels, ExpertSpec
from hotset.engine.kernels.observed import ObservedKernels
from hotset.files import write_beside
from hotset.models.layers import MoeLayer
from hotset.store import SlotLayout

Tensor = torch.Tensor

SHRINK_TOKENS = 64
"""An expert's own moments count as much as those that it is shrunk to once so many tokens have reached it."""
FLOOR = 1e-4
"""The least importance of an input, as a share of the mean: where all errors counted nothing any scale would do."""


class Calibration(Protocol):
    """Fills moments by running a model over text."""

    @property
    def meta(self) -> dict[str, str]:
        """What was run, for the pack to say; another text makes another pack."""

    def collect(self, moments: Moments, state: Path) -> None:
        """Fill the moments; what an interrupted run has left in the file of this name is gone on with."""


@dataclass(slots=True)
class LayerMoments:
    """Sums of squares [experts, inputs] of both products of one layer, and how many tokens reached each expert."""

    names: tuple[str, str]
    up: Tensor
    down: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, moe_layer: MoeLayer) -> LayerMoments:
        """Nothing seen yet."""
        spec, shapes = moe_layer.spec, {part.name: part.shape for part in moe_layer.parts}
        up, down = (
            torch.zeros(moe_layer.experts, shapes[name][0 if spec.is_transposed(name) else -1], dtype=torch.float64)
            for name in (spec.up, spec.down)
        )
        return cls((spec.up, spec.down), up, down, torch.zeros(moe_layer.experts, dtype=torch.float64))

    def add(self, experts: IntArray, ends: Sequence[int], given: Tensor, activated: Tensor) -> None:
        """Take in the rows that went into both products of some experts."""
        for expert, (begin, end) in zip(experts.tolist(), pairwise((0, *ends)), strict=True):
            self.up[expert] += given[begin:end].float().square().sum(0).cpu()
            self.down[expert] += activated[begin:end].float().square().sum(0).cpu()
            self.tokens[expert] += end - begin

    def importance(self, name: str, expert: int) -> Tensor | None:
        """The expert's own moments, shrunk by how few tokens they are of.

        The inputs of the first product are the same for all experts of a layer, so the layer's moments stand in. Those
        of the second are the expert's own neurons, of which no other expert tells: they are shrunk to their mean.
        """
        if not self.tokens.sum():
            return None
        count = self.tokens[expert]
        if name == self.names[0]:
            own, common = self.up[expert], self.up.sum(0) / self.tokens.sum()
        else:
            own = self.down[expert]
            common = (own / count.clamp(min=1)).mean().expand_as(own)
        found = (own + SHRINK_TOKENS * common) / (count + SHRINK_TOKENS)
        mean = found.mean()
        return (found / mean + FLOOR).float() if mean > 0 else None


class Moments:
    """The moments of all layers of a model."""

    def __init__(self) -> None:
        self.layers: list[LayerMoments] = []
        self._waiting: Iterator[LayerMoments] = iter(())

    def expect(self, moe_layers: Sequence[MoeLayer]) -> None:
        """Begin with these layers, of which nothing is known."""
        self.layers = [LayerMoments.of(moe_layer) for moe_layer in moe_layers]

    def of(self, layer: int, name: str, expert: int) -> Tensor | None:
        """How much errors in the weights of each input of a matrix count; None where all count alike."""
        return self.layers[layer].importance(name, expert) if self.layers else None

    def observe(self) -> None:
        """Have the next kernels that are made observe the layers, from the first on."""
        self._waiting = iter(self.layers)

    def kernels(self, arena: Arena, layout: SlotLayout, spec: ExpertSpec, _: int) -> ExpertKernels:
        """Kernels that observe the next layer; to be given to `load_model`."""
        return ObservedKernels(arena, layout, spec, next(self._waiting).add)

    def save(self, path: Path, owner: dict[str, str], passes: int) -> None:
        """Keep what so many passes have come to."""
        from safetensors.torch import save_file

        with write_beside(path) as scratch:
            save_file(self._tensors(), scratch, {"owner": _text(owner), "passes": str(passes)})

    def load(self, path: Path, owner: dict[str, str]) -> int:
        """Take over what an earlier run of the same owner has kept, and return its passes; else there are none."""
        from safetensors import safe_open

        own = self._tensors()
        with suppress(Exception), safe_open(path, framework="pt") as file:  # what is damaged is collected again
            meta = file.metadata()
            if meta["owner"] == _text(owner):
                found = {name: file.get_tensor(name) for name in own}
                passes = int(meta["passes"])
                for name, tensor in own.items():
                    if found[name].shape != tensor.shape or found[name].dtype != tensor.dtype:
                        return 0
                for name, tensor in own.items():
                    tensor.copy_(found[name])
                return passes
        return 0

    def _tensors(self) -> dict[str, Tensor]:
        keys = ("up", "down", "tokens")
        return {f"{n}.{key}": getattr(layer, key) for n, layer in enumerate(self.layers) for key in keys}


_text = partial(json.dumps, sort_keys=True)
