"""The routers of the layers ahead, applied to what this layer's router saw: guesses of what they will choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hotset.models.site import Site

_CORRECTIONS = ("e_score_correction_bias", "expert_bias", "correction_bias")
"""What families that choose by corrected scores add to them; it is not part of the weight of an expert."""


class Gates:
    """All routers of a model as plain matrices."""

    def __init__(
        self,
        matrices: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        offsets: Sequence[torch.Tensor | None] = (),
    ) -> None:
        self.matrices, self.biases = list(matrices), list(biases)
        self.offsets = list(offsets) or [None] * len(self.matrices)

    @classmethod
    def of(cls, model: Any, sites: Sequence[Site]) -> Gates | None:
        """The routers of a model; None if one of them is not a matrix with a row for each expert."""
        found = [_router(model, site) for site in sites]
        matrices = [router.matrix for router in found if router.matrix is not None]
        if len(matrices) < len(sites) or not all(map(_sees_the_same, matrices, sites)):
            return None
        return cls(matrices, [router.correction for router in found], [router.offset for router in found])

    @torch.no_grad()
    def guess(self, layer: int, hidden: torch.Tensor, distances: int, width: int) -> torch.Tensor:
        """What the routers of the next layers make of this layer's input: [tokens, distances, width], best first.

        The numbers stay on the device; past the last layer they are -1.
        """
        width = min(width, *(len(matrix) for matrix in self.matrices))
        nothing = hidden.new_full((len(hidden), width), -1, dtype=torch.long)
        targets = range(layer + 1, layer + distances + 1)
        said = [self._best(target, hidden, width) if target < len(self.matrices) else nothing for target in targets]
        return torch.stack(said, dim=1)

    def _best(self, layer: int, hidden: torch.Tensor, width: int) -> torch.Tensor:
        matrix, bias = self.matrices[layer], self.biases[layer]
        scores = torch.nn.functional.linear(hidden.to(matrix.dtype), matrix, self.offsets[layer])
        if bias is not None:
            scores = scores.sigmoid() + bias
        return scores.topk(width, dim=-1).indices


def _sees_the_same(matrix: torch.Tensor, site: Site) -> bool:
    """Whether a router takes what the experts take: some families project their input in between."""
    return any(matrix.shape[1] in part.shape for part in site.parts if len(part.shape) > 1)


class _Router(NamedTuple):
    matrix: torch.Tensor | None = None
    offset: torch.Tensor | None = None  # added to what the matrix gives
    correction: torch.Tensor | None = None  # added to the scores that decide


def _router(model: Any, site: Site) -> _Router:
    """What a layer's router is made of, as far as it lies beside the experts."""
    prefix = site.name.rpartition(".")[0]
    parent, experts, found = model.get_submodule(prefix), set(site.parameters()), _Router()
    for name, tensor in [*parent.named_parameters(), *parent.named_buffers()]:
        last = name.rpartition(".")[2]
        if (f"{prefix}.{name}" if prefix else name) in experts or tensor.is_meta:
            continue
        if tensor.dim() == 2 and tensor.shape[0] == site.experts and found.matrix is None:
            found = found._replace(matrix=tensor.detach())
        elif tensor.numel() == site.experts and last in _CORRECTIONS:
            found = found._replace(correction=tensor.detach().reshape(-1))
        elif tensor.shape == (site.experts,) and last == "bias":
            found = found._replace(offset=tensor.detach())
    return found
