"""What online logistic regressions share, on the host and on the device: constants, and sums of the same bits.

Steps are scaled by recent gradients (AdaGrad that forgets: sums that only grow make every step smaller, and a change of
workload a trap).
"""

from __future__ import annotations

import math
from typing import Any

from hotset.policies.base import compiled_unchecked

LANES = 8
"""Rows are padded to whole vectors, and sums run in fixed lanes: the same bits on every machine."""
LEARN_RATE = 0.05
FORGET = 0.98
"""What is left of squared gradients at each event."""
MIN_ENERGY = 1e-12
"""A feature that is always zero must not divide by zero."""


def padded(experts: int) -> int:
    """The length of a row of so many experts."""
    return -(-experts // LANES) * LANES


@compiled_unchecked
def step(weights: Any, energy: Any, at: int, gradient: float) -> None:
    """Move one weight along its gradient."""
    energy[at] = FORGET * energy[at] + gradient * gradient + MIN_ENERGY
    weights[at] += LEARN_RATE * gradient / math.sqrt(energy[at])


@compiled_unchecked
def logistic(x: float) -> Any:
    """1 / (1 + exp(-x)) by repeated squaring: multiplications that vectorise, within 0.002 everywhere."""
    power = 1.0 - min(abs(x), 24.0) / 256.0
    for _ in range(8):
        power *= power
    small = power / (1.0 + power)
    return 1.0 - small if x > 0 else small


@compiled_unchecked
def dot(a: Any, b: Any) -> Any:
    """A dot product summed in eight fixed lanes."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0.0
    for i in range(0, len(a), 8):
        s0 += a[i] * b[i]
        s1 += a[i + 1] * b[i + 1]
        s2 += a[i + 2] * b[i + 2]
        s3 += a[i + 3] * b[i + 3]
        s4 += a[i + 4] * b[i + 4]
        s5 += a[i + 5] * b[i + 5]
        s6 += a[i + 6] * b[i + 6]
        s7 += a[i + 7] * b[i + 7]
    return ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))
