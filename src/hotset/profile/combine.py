"""Merging profiles of one model, and telling how far two are apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.errors import ProfileError
from hotset.profile.profile import Profile, State
from hotset.profile.statistics import Counts, Grid


def merge(profiles: Sequence[Profile], weights: Sequence[float] | None = None) -> Profile:
    """One profile of several workloads: counts add up by weight, and so does what a policy learnt, where all have it.

    Everything is a sum, or a mean by the mass of the counts, so merging is associative up to rounding. Who was
    resident, and when there were hits, is of one run and not merged.
    """
    if not profiles:
        raise ProfileError("name at least one profile to merge")
    shares = [1.0] * len(profiles) if weights is None else list(weights)
    if len(shares) != len(profiles) or not all(np.isfinite(share) and share > 0 for share in shares):
        raise ProfileError(f"give {len(profiles)} positive weights, one per profile, such as --weights 2,1")
    first = profiles[0]
    for other in profiles[1:]:
        other.check(first.shape, first.fingerprint)
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
        hits=_total([profile.hits for profile in profiles]),
        misses=_total([profile.misses for profile in profiles]),
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
        learnt[name] = _sum(arrays, shares if name.startswith("sum.") else parts).astype(array.dtype)
    return first.policy, learnt


def _sum(arrays: Sequence[npt.NDArray[Any]], shares: Sequence[float]) -> npt.NDArray[Any]:
    total: npt.NDArray[Any] = np.sum([share * array for share, array in zip(shares, arrays, strict=True)], axis=0)
    return total


def _total(counts: Sequence[Counts | None]) -> Counts | None:
    """Counts added up, where anybody has them."""
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
