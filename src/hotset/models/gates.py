"""The routers of the layers ahead, applied to what this layer's router saw: guesses of what they will choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hotset.models.site import Site

_CORRECTIONS = ("e_score_correction_bias", "expert_bias", "correction_bias")
"""What families that choose by corrected scores add to them; it is not part of the weight of an expert."""


class Gates:
    """All routers of a model as plain matrices."""

    def __init__(self, matrices: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> None:
        self.matrices, self.biases = list(matrices), list(biases)

    @classmethod
    def of(cls, model: Any, sites: Sequence[Site]) -> Gates | None:
        """The routers of a model; None if one of them is not a matrix with a row for each expert."""
        found = [_router(model, site) for site in sites]
        matrices = [matrix for matrix, _ in found if matrix is not None]
        if len(matrices) < len(sites):
            return None
        return cls(matrices, [bias for _, bias in found])

    @torch.no_grad()
    def guess(self, layer: int, hidden: torch.Tensor, distances: int, width: int) -> torch.Tensor:
        """What the routers of the next layers make of this layer's input: [tokens, distances, width], best first.

        The numbers stay on the device; past the last layer they are -1.
        """
        width = min(width, len(self.matrices[0]))
        nothing = hidden.new_full((len(hidden), width), -1, dtype=torch.long)
        targets = range(layer + 1, layer + distances + 1)
        said = [self._best(target, hidden, width) if target < len(self.matrices) else nothing for target in targets]
        return torch.stack(said, dim=1)

    def _best(self, layer: int, hidden: torch.Tensor, width: int) -> torch.Tensor:
        matrix, bias = self.matrices[layer], self.biases[layer]
        scores = torch.nn.functional.linear(hidden.to(matrix.dtype), matrix)
        if bias is not None:
            scores = scores.sigmoid() + bias
        return scores.topk(width, dim=-1).indices


def _router(model: Any, site: Site) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The matrix of a layer's router, and the correction of its scores where it has one."""
    parent = model.get_submodule(site.name.rpartition(".")[0])
    experts = set(site.parameters())
    prefix = site.name.rpartition(".")[0]
    matrix = bias = None
    for name, tensor in [*parent.named_parameters(), *parent.named_buffers()]:
        if (f"{prefix}.{name}" if prefix else name) in experts or tensor.is_meta:
            continue
        if tensor.dim() == 2 and tensor.shape[0] == site.experts and matrix is None:
            matrix = tensor.detach()
        if tensor.shape == (site.experts,) and name.rpartition(".")[2] in _CORRECTIONS:
            bias = tensor.detach()
    return matrix, bias
