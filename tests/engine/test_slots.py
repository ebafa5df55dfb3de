"""Rows of slots, of staging and for prefetch: each row in one place, also after an event that was broken off."""

import numpy as np

from hotset.cache import Controller, Scope, SlotPlan
from hotset.engine.slots import SlotCache
from hotset.policies import parse
from hotset.shape import ModelShape

SHAPE = ModelShape(layers=2, experts=6, top_k=2)


def cache_of(policy: str = "lru") -> SlotCache:
    plan = SlotPlan(SHAPE, 4, Scope.LAYER, staging=3, prefetch_rows=4)
    return SlotCache(Controller(plan, parse(policy)))


def rows_of(cache: SlotCache) -> list[int]:
    return sorted([*cache.rows.tolist(), *cache.staging, *cache.prefetch_rows])


def test_staging_stays_where_a_device_stages_when_an_event_is_broken_off() -> None:
    """Rows that prefetch exchanged leave lower ones spare; the device's kernels know one place for staging."""
    cache = cache_of()
    staging = list(cache.staging)
    for slot in (0, 2, 3):
        row = cache.take_row()
        assert row is not None
        cache.claim(slot, row)
    cache.recover()
    assert cache.staging == staging
    assert rows_of(cache) == list(range(cache.num_rows))


def test_no_row_is_lost_when_an_event_with_late_admission_is_broken_off() -> None:
    cache = cache_of("lru:admit=late")
    rng = np.random.default_rng(0)
    for _ in range(200):
        experts = np.sort(rng.choice(SHAPE.experts, 3, replace=False)).astype(np.int32)
        layer = int(rng.integers(SHAPE.layers))
        cache.look_up(layer, experts, cache.slots_of(layer, experts), np.ones(3, np.int32), 1, 1)
        if rng.random() < 0.3:
            cache.recover()
        else:
            cache.release()
        assert rows_of(cache) == list(range(cache.num_rows))
