"""Which experts are kept: as many in every layer and group, the best by one score, super experts always."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotset.errors import HotsetError

Grid = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Kept = tuple[tuple[int, ...], ...]
"""The experts of each layer that are kept, rising."""
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)\s*%")
_NUMBER = re.compile(r"[0-9]{1,1000}")
MIN_PER_GROUP = 2
"""A router with groups scores each by its two best experts."""


@dataclass(frozen=True, slots=True)
class RouterRules:
    """What a router asks of the experts that it chooses from."""

    experts: int
    top_k: int
    groups: int = 1
    top_groups: int = 1  # groups that a token may choose from

    def check(self, keep: int) -> None:
        """Refuse a number of experts that the router cannot work with."""
        least = self.least
        if keep > self.experts:
            raise HotsetError(f"--keep {keep} is more than the {self.experts} experts of a layer: keep fewer")
        if keep < least:
            raise HotsetError(
                f"--keep leaves {keep} of {self.experts} experts in a layer, and this model needs {least} "
                f"(it chooses {self.top_k} for a token{self._of_groups}): keep {least} or more, --keep {least}"
            )
        if keep % self.groups:
            lower = max(keep // self.groups * self.groups, least)
            raise HotsetError(
                f"--keep leaves {keep} experts, and the router has {self.groups} groups of one size: "
                f"--keep {lower} or --keep {lower + self.groups}"
            )

    @property
    def least(self) -> int:
        """The fewest experts that can be left."""
        if self.groups == 1:
            return self.top_k
        per_group = max(MIN_PER_GROUP, -(-self.top_k // self.top_groups))
        return per_group * self.groups

    @property
    def _of_groups(self) -> str:
        return f", out of {self.top_groups} of {self.groups} groups" if self.groups > 1 else ""


def kept_count(text: str, rules: RouterRules) -> int:
    """How many experts of a layer `--keep` means: a share such as 75%, or a number."""
    share = _SHARE.fullmatch(text.strip())
    if share is None and not _NUMBER.fullmatch(text.strip()):
        raise HotsetError(f"--keep takes a share of the experts such as 75%, or a number of them, not {text!r:.40}")
    if share is not None and not 0 < float(share[1]) <= 100:
        raise HotsetError(f"--keep {text.strip():.20} is no share: give more than 0% and at most 100%")
    keep = int(text) if share is None else int(rules.experts * float(share[1]) / 100 + 0.5)
    rules.check(keep)
    return keep


def choose(scores: Grid, keep: int, rules: RouterRules, protected: Mask | None = None) -> Kept:
    """The experts of each layer with the highest scores [layers, experts], protected ones first, then by number."""
    size, per_group = rules.experts // rules.groups, keep // rules.groups
    must = np.zeros(scores.shape, bool) if protected is None else protected
    found = []
    for layer, (row, needed) in enumerate(zip(scores, must, strict=True)):
        chosen: list[int] = []
        for first in range(0, rules.experts, size):
            part = slice(first, first + size)
            if needed[part].sum() > per_group:
                raise HotsetError(
                    f"layer {layer} has {int(needed[part].sum())} super experts, and {per_group} would be kept: "
                    "keep more experts"
                )
            order = np.lexsort((np.arange(size), -row[part], ~needed[part]))[:per_group]
            chosen += (first + order).tolist()
        found.append(tuple(sorted(chosen)))
    return tuple(found)
