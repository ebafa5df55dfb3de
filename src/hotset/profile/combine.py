"""Merging profiles of one model, and telling how far two are apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.errors import ProfileError
from hotset.profile.matrices import union
from hotset.profile.profile import Profile, State
from hotset.profile.statistics import Counts, Grid

HOT_SHARES = (0.125, 0.25, 0.5)
"""The shares of the experts of a layer that count as its hot set when profiles are compared."""
MAX_WEIGHT = 1e6


def merge(
    profiles: Sequence[Profile], weights: Sequence[float] | None = None, *, allow_foreign: bool = False
) -> Profile:
    """One profile of several workloads: counts add up by weight, and so does what a policy learnt, where all have it.

    Everything is a sum, or a mean by the mass of the counts, so merging is associative up to rounding. Matrices of
    requests are put together; of more than a collection holds, diverse ones stay. Which were resident, and when there
    were hits, is of one run and not merged.
    """
    if not profiles:
        raise ProfileError("name at least one profile to merge")
    shares = [1.0] * len(profiles) if weights is None else list(weights)
    if len(shares) != len(profiles) or not all(0 < share <= MAX_WEIGHT for share in shares):
        raise ProfileError(f"give {len(profiles)} positive weights, one per profile, such as --weights 2,1")
    first = profiles[0]
    for other in profiles[1:]:
        other.check(first.shape, first.fingerprint, allow_foreign=allow_foreign)
    policy, learnt = _merged_learning(profiles, shares)
    return Profile(
        shape=first.shape,
        fingerprint=first.fingerprint,
        uses=_sum([profile.uses for profile in profiles], shares),
        tokens=np.sum([profile.tokens for profile in profiles], axis=0),
        created=min(profile.created for profile in profiles),
        updated=max(profile.updated for profile in profiles),
        policy=policy,
        learnt=learnt,
        hits=total([profile.hits for profile in profiles]),
        misses=total([profile.misses for profile in profiles]),
        matrices=union(first.shape, [profile.matrices for profile in profiles]),
    )


def _merged_learning(profiles: Sequence[Profile], shares: Sequence[float]) -> tuple[str, State]:
    """What the policy learnt in all of them; nothing where the policies differ."""
    first = profiles[0]
    layouts = {tuple((name, p.learnt[name].shape) for name in sorted(p.learnt)) for p in profiles}
    if len({profile.policy for profile in profiles}) > 1 or len(layouts) > 1 or not first.learnt:
        return "", {}
    masses = [share * float(profile.uses.sum()) for share, profile in zip(shares, profiles, strict=True)]
    total = sum(masses)
    parts = [mass / total for mass in masses] if total > 0 else [1 / len(masses)] * len(masses)
    learnt: State = {}
    for name, array in first.learnt.items():
        arrays = [profile.learnt[name] for profile in profiles]
        learnt[name] = _as_type(_sum(arrays, shares if name.startswith("sum.") else parts), array.dtype)
    if any(np.isnan(array).any() for array in learnt.values()):  # infinities that cancel: nothing to go by
        return "", {}
    return first.policy, learnt


def _as_type(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Rounded to the type's own numbers; what is too large for it stays at its end."""
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return array.astype(dtype)
    ends = np.iinfo(dtype)
    largest = min(float(ends.max), np.nextafter(2.0**63, 0))  # as a float, the end of 64 bits lies beyond it
    whole: npt.NDArray[Any] = np.clip(np.rint(array), float(ends.min), largest).astype(dtype)
    return whole


def _sum(arrays: Sequence[npt.NDArray[Any]], shares: Sequence[float]) -> npt.NDArray[Any]:
    with np.errstate(invalid="ignore", over="ignore"):
        parts = [share * array.astype(float) for share, array in zip(shares, arrays, strict=True)]
        total: npt.NDArray[Any] = np.sum(parts, axis=0)
    return total


def total(counts: Sequence[Counts | None]) -> Counts | None:
    """Counts added up, where a profile has them."""
    known = [array for array in counts if array is not None]
    return np.sum(known, axis=0) if known else None


def cosine(some: Profile, other: Profile) -> Grid:
    """How alike two profiles are, per layer: 1 is the same mix of experts, 0 none in common."""
    a, b = some.hotness(), other.hotness()
    norm = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    dot = (a * b).sum(axis=1)
    result: Grid = np.divide(dot, norm, out=np.zeros_like(dot), where=norm > 0)
    return result


def shared_hot_set(some: Profile, other: Profile, per_layer: int) -> float:
    """The share of the hottest experts of each layer that two profiles have in common."""
    a, b = (np.argsort(-p.hotness(), axis=1, kind="stable")[:, :per_layer] for p in (some, other))
    common = sum(len(np.intersect1d(x, y)) for x, y in zip(a, b, strict=True))
    return float(common / a.size) if a.size else 0.0


def compare(some: Profile, other: Profile, top: int = 10) -> dict[str, Any]:
    """How far two profiles are apart: by layer, by hot set, and by the experts that changed most."""
    used = (some.uses.sum(axis=(0, 2)) > 0) | (other.uses.sum(axis=(0, 2)) > 0)
    layers = [float(value) if known else None for value, known in zip(cosine(some, other), used, strict=True)]
    known = {layer: value for layer, value in enumerate(layers) if value is not None}
    return {
        "cosine": {
            "mean": float(np.mean(list(known.values()))) if known else None,
            "min": min(known.values(), default=None),
            "least_alike_layers": sorted(known, key=lambda layer: known[layer])[:5],
            "layers": layers,
        },
        "shared_hot_set": {
            f"{share:.1%}": shared_hot_set(some, other, max(1, round(share * some.shape.experts)))
            for share in HOT_SHARES
        },
        "changed": list(_changed(some.hotness(), other.hotness(), top)),
    }


def _changed(before: Grid, after: Grid, top: int) -> Iterator[dict[str, Any]]:
    """The experts whose hotness changed most, largest change first."""
    change = after - before
    for place in np.argsort(-np.abs(change), axis=None, kind="stable")[:top]:
        layer, expert = divmod(int(place), before.shape[1])
        difference = float(change[layer, expert])
        if difference:
            yield {
                "layer": layer,
                "expert": expert,
                "before": float(before[layer, expert]),
                "after": float(after[layer, expert]),
                "change": difference,
                "direction": "hotter" if difference > 0 else "cooler",
            }
