"""Experts that are a plain list of small modules, as models with code of their own have them: found without an adapter.

What one expert computes is not inferred from names. Its own forward is run on small matrices of random numbers and
compared with what hotset can compute; a list that computes something else is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import torch

from hotset.engine.kernels.spec import ExpertSpec
from hotset.errors import ModelError
from hotset.models.adapters._common import gated
from hotset.models.layers import LayerPart, MoeLayer, RouterTraits, RowRange, parent_of
from hotset.models.list_calls import ListCalls

Tensor = torch.Tensor
Activation = Callable[[Tensor], Tensor]

WIDTH, INNER = 6, 10
"""The sizes of the small matrices."""
UP, DOWN, UP_BIAS, DOWN_BIAS = "up", "down", "up_bias", "down_bias"


def _gelu_tanh(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _squared_relu(x: Tensor) -> Tensor:
    return torch.nn.functional.relu(x).square()


FUNCTIONS: tuple[Activation, ...] = (
    torch.nn.functional.silu, torch.nn.functional.gelu, _gelu_tanh, torch.nn.functional.relu, _squared_relu,
)  # fmt: skip
"""What an expert may activate by that keeps no activation of its own."""


class Roles(NamedTuple):
    """Which of an expert's matrices are multiplied first, gate before up, which last, and what is between them."""

    first: tuple[str, ...]
    last: str
    activation: Activation


def is_expert_list(name: str, module: torch.nn.Module) -> bool:
    """Whether a module is a list of experts that a router chooses from; those that are always used are no matter."""
    words = name.rpartition(".")[2].split("_")
    named = words[-1] in ("expert", "experts") and "shared" not in words
    return named and isinstance(module, torch.nn.ModuleList) and len(module) > 1


def moe_layer_of(name: str, module: Any, model: torch.nn.Module) -> MoeLayer:
    """Describe a list of experts that are all alike; any other raises ModelError."""
    expert, parent = module[0], parent_of(name, model)
    for number, other in enumerate(module):
        if type(other) is not type(expert) or _shapes(other) != _shapes(expert):
            raise _irregular(name, f"expert {number} is not like the first")
    roles = _roles(name, expert)
    first, last = [getattr(expert, key) for key in roles.first], getattr(expert, roles.last)
    inner, biased = len(first) * first[0].out_features, first[0].bias is not None
    parts = [
        _part(name, UP, roles.first, "weight", (inner, first[0].in_features)),
        _part(name, DOWN, (roles.last,), "weight", tuple(last.weight.shape)),
    ]
    if biased:
        parts.append(_part(name, UP_BIAS, roles.first, "bias", (inner,)))
    if last.bias is not None:
        parts.append(_part(name, DOWN_BIAS, (roles.last,), "bias", (last.out_features,)))
    spec = ExpertSpec(
        UP,
        DOWN,
        gated(roles.activation) if len(roles.first) > 1 else roles.activation,
        up_bias=UP_BIAS if biased else None,
        down_bias=None if last.bias is None else DOWN_BIAS,
        looped=True,
    )
    top_k = RouterTraits().top_k_of((parent, *parent.children(), getattr(model, "config", None)), len(module))
    return MoeLayer(name, module, len(module), top_k, tuple(parts), spec, ListCalls(parent, module).install)


def _part(name: str, part: str, keys: Sequence[str], leaf: str, shape: tuple[int, ...]) -> LayerPart:
    """A tensor of every expert that is made of the matrices of these names, one below the other."""
    rows = shape[0] // len(keys)
    return LayerPart(
        part, shape, lambda number: tuple(RowRange(f"{name}.{number}.{key}.{leaf}", 0, rows) for key in keys)
    )


def _shapes(expert: torch.nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    tensors = [*expert.named_parameters(), *expert.named_buffers()]
    return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]


def _roles(name: str, expert: torch.nn.Module) -> Roles:
    """Who is who in an expert: the only way to compute what its own forward computes."""
    linears = {key: child for key, child in expert.named_children() if isinstance(child, torch.nn.Linear)}
    if len(linears) not in (2, 3) or len(_shapes(expert)) != sum(1 + (x.bias is not None) for x in linears.values()):
        raise _irregular(name, "an expert is more than two or three linear maps")
    for last, final in linears.items():
        first = [key for key in linears if key != last]
        into = linears[first[0]]
        alike = len({(linears[key].weight.shape, linears[key].bias is None) for key in first}) == 1
        outer = final.in_features == into.out_features and final.out_features == into.in_features
        if alike and outer and (found := _matching(expert, first, last)) is not None:
            return found
    raise _irregular(name, "an expert computes something else than down(act(gate(x)) * up(x)) or down(act(up(x)))")


@torch.no_grad()
def _matching(expert: torch.nn.Module, first: Sequence[str], last: str) -> Roles | None:
    """The order of the first matrices and the activation by which an expert's own forward is come by."""
    small = _in_small(expert, first, last)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(5, WIDTH, generator=random, dtype=torch.float64)
    try:
        right = small(x)
    except Exception:  # whatever the model's own code raises that is given these matrices in this order
        return None
    if not isinstance(right, Tensor) or right.shape != x.shape:
        return None
    for order in permutations(first):
        for activation in _activations(expert):
            inner = activation(getattr(small, order[0])(x))
            inner = inner * getattr(small, order[1])(x) if len(order) > 1 else inner
            if torch.allclose(getattr(small, last)(inner), right, rtol=1e-6, atol=1e-9):
                return Roles(order, last, activation)
    return None


def _in_small(expert: torch.nn.Module, first: Sequence[str], last: str) -> Any:
    """The same expert with other, smaller matrices; its own stay where they are."""
    small: Any = copy.copy(expert)
    small._modules = dict(expert._modules)
    random = torch.Generator().manual_seed(1)
    for key in (*first, last):
        own: Any = getattr(expert, key)
        sides = (INNER, WIDTH) if key == last else (WIDTH, INNER)
        fresh = torch.nn.Linear(*sides, bias=own.bias is not None, dtype=torch.float64, device="cpu")
        for parameter in fresh.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64))
        small._modules[key] = fresh
    small.training = False
    return small


def _activations(expert: torch.nn.Module) -> Iterator[Activation]:
    """What an expert itself has that may be its activation, then the usual ones."""
    held = [*expert._modules.values(), *vars(expert).values()]
    for one in held:
        if callable(one) and not isinstance(one, torch.nn.Linear | torch.nn.Dropout | type):
            yield _guarded(one)
    yield from FUNCTIONS


def _guarded(activation: Any) -> Activation:
    """A callable of the model's own code, which may be no activation at all."""

    def call(x: Tensor) -> Tensor:
        out = activation(x)
        return out if isinstance(out, Tensor) and out.shape == x.shape else torch.full_like(x, torch.nan)

    return call


def _irregular(name: str, why: str) -> ModelError:
    return ModelError(
        f"hotset cannot serve the experts in {name}: {why}; lists of equal experts with two or three linear maps are "
        "served, others need an adapter"
    )
