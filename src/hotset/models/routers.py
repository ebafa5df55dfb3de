"""The routers of the next layers, applied to what this layer's router saw: predictions of what they will choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from hotset.models.layers import MoeLayer, parent_of

Tensor = torch.Tensor

_SCORES: tuple[Callable[[Tensor], Tensor] | None, ...] = (
    None,
    torch.sigmoid,
    lambda logits: logits.softmax(dim=-1),
    lambda logits: torch.nn.functional.softplus(logits).sqrt(),
)
"""What routers make of their logits, cheapest first; it only matters to what is added or summed afterwards."""


class Choice(NamedTuple):
    """How a router gets from its logits to its experts: their scores, and the groups outside of which it chooses none.

    A group is worth the sum of its `counted` best; those in the `kept` best groups can be chosen.
    """

    score: Callable[[Tensor], Tensor] | None = None
    groups: int = 1
    kept: int = 1
    counted: int = 1

    def scores(self, logits: Tensor, correction: Tensor | None, experts: int) -> Tensor:
        """What decides who is chosen: [tokens, experts]; rows past them count in the scores only."""
        scores = logits if self.score is None else self.score(logits)
        if scores.shape[-1] > experts:
            scores = scores[:, :experts]
        if correction is not None:
            scores = scores + correction
        if self.groups > self.kept:
            scores = self._limited(scores)
        return scores

    def _limited(self, scores: Tensor) -> Tensor:
        grouped = scores.view(len(scores), self.groups, -1)
        worth = grouped.topk(self.counted, dim=-1).values.sum(dim=-1)
        last = worth.topk(self.kept, dim=-1).values[:, -1:]
        return grouped.masked_fill((worth < last).unsqueeze(-1), float("-inf")).view(scores.shape)


class Router(NamedTuple):
    """One router as a matrix, and how it chooses."""

    matrix: Tensor
    experts: int  # some have rows for more, which are not loaded
    offset: Tensor | None = None  # added to what the matrix gives
    correction: Tensor | None = None  # added to the scores that decide
    choice: Choice = Choice()

    def best(self, hidden: Tensor, width: int) -> Tensor:
        """The numbers of those whom it puts first for each token, best first."""
        return self.scores(hidden).topk(width, dim=-1).indices

    def scores(self, hidden: Tensor) -> Tensor:
        """By what it chooses: [tokens, experts]."""
        if hidden.dtype is not self.matrix.dtype:
            hidden = hidden.to(self.matrix.dtype)
        logits = torch.nn.functional.linear(hidden, self.matrix, self.offset)
        return self.choice.scores(logits, self.correction, self.experts)


class Routers:
    """All routers of a model; None for a layer whose router cannot be told from what the experts are given.

    Given a layer's own input they choose as the model does, except that logits are computed in the type of the matrix,
    where many routers take float32: of near ties the other may win.
    """

    def __init__(self, routers: Sequence[Router | None], scales: Sequence[Tensor | None] = ()) -> None:
        self.routers = list(routers)
        self.scales = list(scales) or [None] * len(self.routers)  # from what experts are given to what routers take
        self._most = min((router.experts for router in self.routers if router is not None), default=0)

    @classmethod
    def of(cls, model: Any, moe_layers: Sequence[MoeLayer]) -> Routers | None:
        """The routers of a model; None if none of them is a matrix for what the experts are given."""
        asked: dict[type, Choice] = {}
        routers = [_router(model, moe_layer, asked) for moe_layer in moe_layers]
        alike = len({_width(moe_layer) for moe_layer in moe_layers}) == 1
        return cls(routers, [_scale(model, moe_layer) for moe_layer in moe_layers]) if alike and any(routers) else None

    def predict(self, layer: int, hidden: Tensor, distances: int, width: int) -> Tensor:
        """What the routers of the next layers make of this layer's input: [tokens, distances, width], best first.

        The numbers stay on the device; where there is no router to ask they are -1. It runs at every layer of every
        token, so no operation is here that is not needed: each costs the host more than the device.
        """
        width = min(width, self._most)
        next_routers = self.routers[layer + 1 : layer + 1 + distances]
        if not any(next_routers):
            return _nothing(len(hidden), distances, width, hidden.device)
        scale = self.scales[layer]
        if scale is not None:
            hidden = hidden * scale
        if distances == 1 and next_routers[0] is not None:
            return next_routers[0].best(hidden, width).unsqueeze(1)
        none = _nothing(len(hidden), 1, width, hidden.device)[:, 0]
        predicted = [none if router is None else router.best(hidden, width) for router in next_routers]
        return torch.stack(predicted + [none] * (distances - len(predicted)), dim=1)

    def scores(self, layer: int, hidden: Tensor, distances: int) -> list[Tensor]:
        """By what the routers of the next layers would choose for this layer's input: [tokens, experts] of each.

        All have the width of the widest; who cannot be chosen has minus infinity. Beyond the last layer there is none.
        """
        scale = self.scales[layer]
        if scale is not None:
            hidden = hidden * scale
        next_routers = self.routers[layer + 1 : layer + 1 + distances]
        widest = max((router.experts for router in self.routers if router is not None), default=0)
        return [_none_of(len(hidden), widest, hidden.device) if one is None else _widened(one.scores(hidden), widest)
                for one in next_routers]  # fmt: skip


def _widened(scores: Tensor, width: int) -> Tensor:
    """Scores of as many experts as the widest layer has."""
    if scores.shape[-1] < width:
        scores = torch.nn.functional.pad(scores, (0, width - scores.shape[-1]), value=float("-inf"))
    return scores.contiguous()


@lru_cache(maxsize=64)
def _none_of(tokens: int, experts: int, device: torch.device) -> Tensor:
    """No expert can be chosen; made once and then shared, never written to."""
    return torch.full((tokens, experts), float("-inf"), device=device)


@lru_cache(maxsize=64)
def _nothing(tokens: int, distances: int, width: int, device: torch.device) -> Tensor:
    """No predictions, made once and then shared, never written to."""
    return torch.full((tokens, distances, width), -1, device=device)


def _router(model: Any, moe_layer: MoeLayer, asked: dict[type, Choice]) -> Router | None:
    """The router of a layer; None if it is more than a matrix, or if experts take a projection of what it takes."""
    parent = parent_of(moe_layer.name, model)
    traits = moe_layer.router
    held = [getattr(holder, name, None) for holder in (moe_layer.module, parent) for name in traits.modules]
    module = next((each for each in held if isinstance(each, torch.nn.Module)), None)
    matrix = None if module is None else _matrix(module, moe_layer)
    if module is None or matrix is None:
        return None
    own, beside = _named(module), _named(parent, recurse=False)
    corrections = [tensor.reshape(-1) for name, tensor in (beside | own).items() if name in traits.corrections]
    correction = next((each[: moe_layer.experts] for each in corrections if len(each) >= moe_layer.experts), None)
    bias = own.get("bias")
    offset = None if bias is None or bias.shape != matrix.shape[:1] else bias.to(matrix.dtype)
    found = Router(matrix, moe_layer.experts, offset, correction)
    return found._replace(choice=_choice(module, found, moe_layer, asked))


def _matrix(module: Any, moe_layer: MoeLayer) -> Tensor | None:
    """The one matrix of a router; a scale of its input becomes part of it."""
    if any(not buffer.is_floating_point() for buffer in module.buffers()):
        return None  # it looks up experts by token
    named = [(name.rpartition(".")[2], tensor) for name, tensor in module.named_parameters()]
    corrections = moe_layer.router.corrections
    matrices = [tensor.detach() for name, tensor in named if tensor.dim() == 2 and name not in corrections]
    if len(matrices) != 1 or matrices[0].is_meta or matrices[0].element_size() == 1:
        return None
    matrix: Tensor = matrices[0]
    if matrix.shape[1] != _width(moe_layer) or len(matrix) < moe_layer.experts:
        return None
    scale = _named(module).get("scale")
    return matrix if scale is None else matrix.mul(scale)


def _named(module: Any, *, recurse: bool = True) -> dict[str, Tensor]:
    """Parameters and buffers that are there, by the last part of their names."""
    tensors = [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]
    return {name.rpartition(".")[2]: tensor.detach() for name, tensor in tensors if not tensor.is_meta}


def _width(moe_layer: MoeLayer) -> int:
    """The size of what the experts are given."""
    up = next(part for part in moe_layer.parts if part.name == moe_layer.spec.up)
    return up.shape[0 if moe_layer.spec.up_transposed else -1]


def _scale(model: Any, moe_layer: MoeLayer) -> Tensor | None:
    """What turns the experts' input into the router's, where each has its own norm of the same state."""
    if moe_layer.router.experts_norm is None:
        return None
    norm: Any = parent_of(moe_layer.name, model).get_submodule(moe_layer.router.experts_norm)
    if norm.weight.is_meta:
        return None
    weight: Tensor = norm.weight.detach()
    return weight.reciprocal().nan_to_num(posinf=0.0, neginf=0.0)  # what was times zero stays unknown


def _choice(module: Any, router: Router, moe_layer: MoeLayer, asked: dict[type, Choice]) -> Choice:
    """How a router chooses; each class is asked once, where it makes a difference."""
    kind, groups = type(module), _groups(module, router.experts)
    if kind in asked:
        return asked[kind]
    if not groups and (router.correction is None or not router.correction.any()):
        return Choice()
    options = [Choice(score, *limit) for limit in [(1, 1, 1), *groups] for score in _SCORES]
    asked[kind] = _ask(module, router, moe_layer, options) or Choice(torch.sigmoid)  # as most families have it
    return asked[kind]


def _groups(module: Any, experts: int) -> list[tuple[int, int, int]]:
    """The limits to groups that a router may have: how many there are, how many are kept, how many count in one."""
    groups, kept = getattr(module, "num_group", None) or 1, getattr(module, "topk_group", None) or 1
    fit = groups > kept and experts % groups == 0 and experts > groups
    return [(groups, kept, 2), (groups, kept, 1)] if fit else []


@torch.no_grad()
def _ask(module: Any, router: Router, moe_layer: MoeLayer, options: Sequence[Choice]) -> Choice | None:
    """The option that chooses most like the router itself; None if it cannot be asked."""
    rows, top_k = _rows(router.matrix), moe_layer.top_k
    holds_correction = any(name in moe_layer.router.corrections for name in _named(module))
    right = _chosen(module, rows, None if holds_correction else router.correction, top_k)
    if right is None:
        return None
    logits = torch.nn.functional.linear(rows, router.matrix, router.offset)

    def alike(option: Choice) -> int:
        predicted = option.scores(logits, router.correction, router.experts).topk(top_k, dim=-1).indices
        return int((predicted.unsqueeze(-1) == right.unsqueeze(-2)).sum())

    return max(options, key=alike)


def _rows(matrix: Tensor, count: int = 32) -> Tensor:
    """Random inputs from small to large, so that no score is everywhere flat; they leave torch's own generator be."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(count, matrix.shape[1], generator=random) * torch.logspace(-1, 1, count).unsqueeze(1)
    return rows.to(matrix)


def _chosen(module: Any, rows: Tensor, correction: Tensor | None, top_k: int) -> Tensor | None:
    """What the router itself chooses for these rows; families differ in how theirs is called."""
    try:
        out = module.forward(
            *(rows,) if correction is None else (rows, correction)
        )  # not the call: a hook on that counts passes of the model
    except (TypeError, ValueError, RuntimeError, IndexError):
        return None
    numbers = [one for one in (out if isinstance(out, tuple) else ()) if one.dtype == torch.long]
    return numbers[0].view(len(rows), top_k) if [one.numel() for one in numbers] == [len(rows) * top_k] else None
