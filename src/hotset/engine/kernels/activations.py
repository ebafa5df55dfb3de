# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ARG001 - all kinds take the same arguments
"""What lies between the two products of an expert: every kind as Triton code, and the same in torch to tell it by.

The kinds round as torch does on tensors of the weights' type: after every operation of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

from hotset.engine.kernels.spec import ExpertSpec

Tensor = torch.Tensor
Function = Callable[[Tensor], Tensor]

PROBED_WIDTH = 32
_LIMITS = ("limit", "swiglu_limit")
_ALPHAS = ("alpha", "swiglu_alpha")


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """A float32 as it is after a stay in another type."""
    return value.to(dtype).to(tl.float32)


@triton.jit
def _silu(x):
    return tl.div_rn(x, 1.0 + tl.exp(-x))


@triton.jit
def _gelu(x):
    return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_tanh(x):
    # 0.5 (1 + tanh u) is the logistic function of 2 u, and that needs no tanh, which Triton lacks.
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return tl.div_rn(x, 1.0 + tl.exp(-2.0 * u))


@triton.jit
def _at_most(x, limit: tl.constexpr):
    return tl.where(x > limit, limit, x)  # keeps what is no number, as torch does


@triton.jit
def _within(x, limit: tl.constexpr):
    return tl.where(x < -limit, -limit, _at_most(x, limit))


@triton.jit
def silu_and_mul(gate, up, alpha: tl.constexpr, limit: tl.constexpr, dtype: tl.constexpr):
    """Most families."""
    return rounded(_silu(gate), dtype) * up


@triton.jit
def silu_and_mul_at_once(gate, up, alpha: tl.constexpr, limit: tl.constexpr, dtype: tl.constexpr):
    """In float32 throughout, rounded only at the end."""
    return _silu(gate) * up


@triton.jit
def gelu_and_mul(gate, up, alpha: tl.constexpr, limit: tl.constexpr, dtype: tl.constexpr):
    """The gate through the exact GELU."""
    return rounded(_gelu(gate), dtype) * up


@triton.jit
def gelu_tanh_and_mul(gate, up, alpha: tl.constexpr, limit: tl.constexpr, dtype: tl.constexpr):
    """The gate through the approximate GELU."""
    return rounded(_gelu_tanh(gate), dtype) * up


@triton.jit
def relu_and_mul(gate, up, alpha: tl.constexpr, limit: tl.constexpr, dtype: tl.constexpr):
    """The gate without what is below zero."""
    return tl.where(gate < 0, 0.0, gate) * up


@triton.jit
def clamped_silu_and_mul(gate, up, alpha: tl.constexpr, limit: tl.constexpr, dtype: tl.constexpr):
    """Both halves limited first (DeepSeek V4)."""
    bound = rounded(_at_most(gate, limit), dtype)
    return rounded(_silu(bound), dtype) * rounded(_within(up, limit), dtype)


@triton.jit
def silu_clamped_and_mul(gate, up, alpha: tl.constexpr, limit: tl.constexpr, dtype: tl.constexpr):
    """The gate limited once it is activated (Step 3.7)."""
    bound = rounded(_at_most(rounded(_silu(gate), dtype), limit), dtype)
    return bound * rounded(_within(up, limit), dtype)


@triton.jit
def clamped_glu(gate, up, alpha: tl.constexpr, limit: tl.constexpr, dtype: tl.constexpr):
    """Both halves limited, a steeper sigmoid, and one more of the other half (gpt-oss)."""
    bound = rounded(_at_most(gate, limit), dtype)
    slope = rounded(tl.div_rn(1.0, 1.0 + tl.exp(-rounded(bound * alpha, dtype))), dtype)
    return rounded(rounded(_within(up, limit), dtype) + 1.0, dtype) * rounded(bound * slope, dtype)


@triton.jit
def relu2(gate, up, alpha: tl.constexpr, limit: tl.constexpr, dtype: tl.constexpr):
    """No gate: the square of what is above zero."""
    positive = tl.where(gate < 0, 0.0, gate)
    return positive * positive


@triton.jit
def relu(gate, up, alpha: tl.constexpr, limit: tl.constexpr, dtype: tl.constexpr):
    """No gate: what is above zero."""
    return tl.where(gate < 0, 0.0, gate)


@triton.jit
def silu(gate, up, alpha: tl.constexpr, limit: tl.constexpr, dtype: tl.constexpr):
    """No gate."""
    return _silu(gate)


@triton.jit
def gelu(gate, up, alpha: tl.constexpr, limit: tl.constexpr, dtype: tl.constexpr):
    """No gate: the exact GELU."""
    return _gelu(gate)


@triton.jit
def gelu_tanh(gate, up, alpha: tl.constexpr, limit: tl.constexpr, dtype: tl.constexpr):
    """No gate: the approximate GELU."""
    return _gelu_tanh(gate)


def _approximate(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _torch_glu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    gate = gate.clamp(max=limit)
    glu = gate * torch.sigmoid(gate * alpha)
    return (up.clamp(min=-limit, max=limit) + 1) * glu


_Reference = Callable[[Tensor, Tensor, float, float], Tensor]
_GATED: list[tuple[Any, _Reference]] = [
    (silu_and_mul, lambda g, u, _, __: functional.silu(g) * u),
    (silu_and_mul_at_once, lambda g, u, _, __: (functional.silu(g.float()) * u.float()).to(g.dtype)),
    (gelu_and_mul, lambda g, u, _, __: functional.gelu(g) * u),
    (gelu_tanh_and_mul, lambda g, u, _, __: _approximate(g) * u),
    (relu_and_mul, lambda g, u, _, __: functional.relu(g) * u),
    (clamped_silu_and_mul, lambda g, u, _, m: functional.silu(g.clamp(max=m)) * u.clamp(min=-m, max=m)),
    (silu_clamped_and_mul, lambda g, u, _, m: functional.silu(g).clamp(max=m) * u.clamp(min=-m, max=m)),
    (clamped_glu, _torch_glu),
]
_PLAIN: list[tuple[Any, _Reference]] = [
    (relu2, lambda g, _, __, ___: functional.relu(g).square()),
    (relu, lambda g, _, __, ___: functional.relu(g)),
    (silu, lambda g, _, __, ___: functional.silu(g)),
    (gelu, lambda g, _, __, ___: functional.gelu(g)),
    (gelu_tanh, lambda g, _, __, ___: _approximate(g)),
]


@dataclass(frozen=True, slots=True)
class Activation:
    """One kind, with its numbers: what a kernel needs to know of it."""

    function: Any  # Triton code of (gate, up, alpha, limit, dtype)
    reference: _Reference
    gated: bool
    interleaved: bool
    alpha: float
    limit: float

    @property
    def kind(self) -> str:
        """Its name."""
        return str(self.function.__name__)

    def __call__(self, both: Tensor) -> Tensor:
        """The same in torch."""
        if not self.gated:
            return self.reference(both, both, self.alpha, self.limit)
        gate, up = (both[..., ::2], both[..., 1::2]) if self.interleaved else both.chunk(2, dim=-1)
        return self.reference(gate, up, self.alpha, self.limit)


def activation_of(given: ExpertSpec | Function, dtype: torch.dtype = torch.bfloat16) -> Activation | None:
    """The kind that a family's own function computes, found by running it on random numbers; None if it is not known.

    It must agree in float32, where kinds differ in what they compute, and to the bit in the weights' type, where they
    differ in when they round.
    """
    function = given.activation if isinstance(given, ExpertSpec) else given
    try:
        with torch.no_grad():
            return next((kind for kind in _candidates(function) if _agrees(function, kind, dtype)), None)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None  # whatever it is, it is no function of one tensor on a CPU


def _candidates(function: Any) -> Iterator[Activation]:
    """All kinds, with the numbers that the function's module has, the plainest first."""
    owner = getattr(function, "__self__", None)
    alpha, limit = _number(owner, _ALPHAS, 1.702), _number(owner, _LIMITS, 7.0)
    for interleaved in (False, True):
        for code, reference in _GATED:
            yield Activation(code, reference, True, interleaved, alpha, limit)
    for code, reference in _PLAIN:
        yield Activation(code, reference, False, False, alpha, limit)


def _number(owner: Any, names: tuple[str, ...], default: float) -> float:
    found = (getattr(owner, name, None) for name in names)
    return next((float(value) for value in found if isinstance(value, int | float)), default)


def _agrees(function: Function, kind: Activation, dtype: torch.dtype) -> bool:
    rows = _probe(kind.limit)
    expected, found = kind(rows), function(rows)
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-6, atol=1e-6):
        return False
    rows = rows.to(dtype)
    return dtype == torch.float32 or torch.equal(function(rows), kind(rows))


def _probe(limit: float, count: int = 24) -> Tensor:
    """Random rows from small to far beyond any limit; torch's own generator is left alone."""
    random = torch.Generator("cpu").manual_seed(0)
    most = max(4.0 * limit if math.isfinite(limit) else 0.0, 1e4)
    scales = torch.logspace(-1, math.log10(most), count, dtype=torch.float32, device="cpu").unsqueeze(1)
    return scales * torch.randn(count, 2 * PROBED_WIDTH, generator=random, dtype=torch.float32, device="cpu")
