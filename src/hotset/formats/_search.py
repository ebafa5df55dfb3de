"""Codes and scales of least squared error, for matrices that hotset makes small itself."""

from __future__ import annotations

import torch

from hotset.errors import FormatError
from hotset.formats._numbers import FP4_VALUES
from hotset.formats.base import element_type

Tensor = torch.Tensor

STEPS = {4: [0.8 + 0.025 * step for step in range(19)], 8: [0.98 + 0.005 * step for step in range(9)]}
"""Scales to be tried for codes of so many bits, as shares of that which takes the largest number to the last code."""
BELOW = 2
"""E2M1's largest number is 6, between 2^2 and 2^3: its exponent lies so far below that of the largest number."""
LARGEST_EXPONENT = 254
SHORT_DIGITS = 5
"""Of a scale whose products with codes of 4 bits, which have 3 digits, are bfloat16 numbers, which have 8."""


def integer_groups(
    groups: Tensor, bits: int, scales: str, importance: Tensor | None = None, *, short: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes and scales of numbers [..., of a group]: float32 in, bytes and scales of the named type out.

    The error of each number counts by the importance of its input, where that is known. Short scales have few digits.

    The number of largest size, whichever sign it has, is tried at the last negative code, which has one more than the
    positive side; the best of these scales is then replaced by that which fits its codes best.
    """
    middle = 1 << (bits - 1)
    largest = groups.gather(-1, _finite(groups).abs().argmax(-1, keepdim=True))
    best = _Best(groups, importance)
    for share in STEPS[bits]:
        best.take(*_codes(groups, largest * (-share / middle), bits, scales, short))
    numbers = best.codes.float() - middle
    weighted = numbers if importance is None else numbers * importance
    squares = (weighted * numbers).sum(-1, keepdim=True)
    fitted = (weighted * groups).sum(-1, keepdim=True) / torch.where(squares == 0, 1, squares)
    best.take(*_codes(groups, fitted, bits, scales, short))
    return best.codes, best.scales.squeeze(-1)


def mxfp4_groups(groups: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and exponent bytes of numbers [..., 32], the better of two or three exponents for each group."""
    largest = _finite(groups).abs().amax(-1, keepdim=True)
    exponent = torch.frexp(largest).exponent - 1 - BELOW + 127
    best = _Best(groups, importance)
    for more in (0, 1, -1):
        byte = torch.where(largest == 0, 0, (exponent + more).clamp(0, LARGEST_EXPONENT)).to(torch.uint8)
        power = byte.view(torch.float8_e8m0fnu).float()
        codes = fp4_codes(groups / power)
        values = torch.tensor(FP4_VALUES)[codes.int()] * power
        best.take(codes, byte, values)
    return best.codes, best.scales.squeeze(-1)


def fp4_codes(numbers: Tensor) -> Tensor:
    """The codes of the E2M1 numbers next to these."""
    values = torch.tensor(FP4_VALUES[:8])
    between = (values[1:] + values[:-1]) / 2
    return (torch.bucketize(numbers.abs(), between) + 8 * (numbers < 0)).to(torch.uint8)


class _Best:
    """Of several encodings of the same groups, the best of each group."""

    def __init__(self, groups: Tensor, importance: Tensor | None) -> None:
        self.groups, self.importance = groups, importance
        self.error = torch.full((*groups.shape[:-1], 1), torch.inf)
        self.codes, self.scales = torch.zeros_like(groups, dtype=torch.uint8), torch.zeros(0)

    def take(self, codes: Tensor, scales: Tensor, values: Tensor) -> None:
        errors = (values - self.groups).square_()
        error = (errors if self.importance is None else errors.mul_(self.importance)).sum(-1, keepdim=True)
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.codes = torch.where(better, codes, self.codes)
        self.scales = torch.where(better, scales, self.scales) if len(self.scales) else scales


def _codes(groups: Tensor, wanted: Tensor, bits: int, scales: str, short: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The codes next to numbers at scales rounded to their type, those scales, and what both stand for."""
    middle, kept = 1 << (bits - 1), (_shortened(wanted) if short else wanted).to(element_type(scales))
    factors = kept.float()
    shares = torch.where(factors == 0, 0, groups / factors)
    whole = shares.round().clamp(-middle, middle - 1)
    return (whole + middle).to(torch.uint8), kept, whole * factors


def _shortened(numbers: Tensor) -> Tensor:
    """Numbers rounded to few digits."""
    fraction, exponent = torch.frexp(numbers)
    return torch.ldexp((fraction * (1 << SHORT_DIGITS)).round(), exponent - SHORT_DIGITS)


def _finite(groups: Tensor) -> Tensor:
    if not groups.isfinite().all():
        raise FormatError("the matrix holds numbers that are not finite, which no code stands for")
    return groups
