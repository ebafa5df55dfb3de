"""Merging profiles of one model, and telling how far two are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hotset.errors import ProfileError
from hotset.profile.profile import Grid, Profile


def merge(profiles: Sequence[Profile], weights: Sequence[float] | None = None) -> Profile:
    """One profile of several workloads; what a policy learnt cannot be added up and is left out.

    Merging is associative up to rounding as long as the weights are those of the parts: counts simply add.
    """
    if not profiles:
        raise ProfileError("name at least one profile to merge")
    shares = [1.0] * len(profiles) if weights is None else list(weights)
    if len(shares) != len(profiles) or not all(np.isfinite(share) and share > 0 for share in shares):
        raise ProfileError(f"give {len(profiles)} positive weights, one per profile, such as --weights 2,1")
    first = profiles[0]
    for other in profiles[1:]:
        other.check(first.shape, first.fingerprint)
    return replace(
        first,
        uses=np.sum([share * profile.uses for share, profile in zip(shares, profiles, strict=True)], axis=0),
        tokens=np.sum([profile.tokens for profile in profiles], axis=0),
        created=min(profile.created for profile in profiles),
        updated=max(profile.updated for profile in profiles),
        policy="",
        learnt={},
    )


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
