"""Profiles that tests share: small, with every optional part filled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hotset.profile import Fingerprint, Profile
from hotset.profile.statistics import History, Mark
from hotset.shape import ModelShape

SHAPE = ModelShape(3, 8, 2, 4096)


def full_profile(seed: int = 0, **changes: object) -> Profile:
    random = np.random.default_rng(seed)
    grid = (2, 3, 8)
    profile = Profile(
        shape=SHAPE,
        fingerprint=Fingerprint("Qwen3MoeForCausalLM", "abc"),
        uses=random.gamma(0.5, size=grid) * 100,
        tokens=random.integers(1, 1000, 2),
        created="2026-11-01T00:00:00Z",
        updated=f"2026-11-{10 + seed % 20}T00:00:00Z",
        policy="blend",
        learnt={
            "mean.rates": random.random((3, 8, 2)),
            "mean.weights": random.random(7).astype(np.float32),
            "sum.seen": random.random(3) * 50,
        },
        hits=random.integers(0, 90, grid),
        misses=random.integers(0, 90, grid),
        residency=random.integers(0, 4, grid[1:]).astype(np.uint8),
        history=History(random.integers(0, 99, (5, 3)), (Mark(0, "begin"), Mark(70, "italian"))),
        meta={"name": "italian"},
    )
    return replace(profile, **changes)  # type: ignore[arg-type]
