"""A change of the slot table that is broken off anywhere is put in order: every slot has one owner again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from live_samples import cache_of
from test_reservations import check_slots

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "trust"))

from breakpoints import SUPPORTED, Breakpoints

from hotset.cache import Controller, Scope
from hotset.engine.slots import SlotCache
from hotset.shape import ExpertKey, ModelShape

SHAPE = ModelShape(2, 6, 2)
HERE, RESERVED, NEW = ExpertKey(0, 1), ExpertKey(0, 2), ExpertKey(0, 3)
OWNER = object()

CHANGES: dict[str, Callable[[Controller], object]] = {
    "reserve": lambda controller: controller.residency.reserve(NEW, OWNER),
    "commit": lambda controller: controller.residency.commit(RESERVED),
    "commit and pin": lambda controller: SlotCache(controller).commit(RESERVED, pin=True),
    "give back": lambda controller: controller.residency.cancel_all(OWNER),
    "evict": lambda controller: controller.residency.reserve_all(
        [NEW, ExpertKey(0, 4), ExpertKey(0, 5)], evict=True, owner=OWNER
    ),
    "drop": lambda controller: controller.residency.drop([HERE, ExpertKey(0, 0)]),
    "preload": lambda controller: controller.preload(np.eye(2, 6) + np.eye(2, 6, 3)),
    "pin": lambda controller: controller.pin([HERE]),
    "unpin": lambda controller: controller.unpin([ExpertKey(1, 0)]),
}


def begun(scope: Scope) -> Controller:
    controller = cache_of(SHAPE, 10, "lru", scope)
    for key in (ExpertKey(0, 0), HERE, ExpertKey(1, 0), ExpertKey(1, 4)):
        assert controller.residency.reserve(key) is not None
        controller.residency.commit(key)
    controller.pin([ExpertKey(1, 0)])
    assert controller.residency.reserve(RESERVED, OWNER) is not None
    return controller


@pytest.mark.skipif(not SUPPORTED, reason="instructions are traced on Python 3.11")
@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("name", CHANGES)
def test_an_interrupt_at_any_place_is_put_in_order(name: str, scope: Scope) -> None:
    for number in range(1000):
        controller = begun(scope)
        strike = Breakpoints(number)
        try:
            with strike:
                CHANGES[name](controller)
        except KeyboardInterrupt:
            controller.residency.rebuild()
            check_slots(controller, {key: held.slot for key, held in controller.residency.reserved.items()})
            controller.residency.cancel_all(OWNER)
            check_slots(controller, {})
            assert (controller.table.last[RESERVED] == 0) == (RESERVED not in controller.pins())
        if not strike.struck:
            assert number > 2, "nothing was interrupted"
            return
    raise AssertionError("the change does not end")


@pytest.mark.skipif(not SUPPORTED, reason="instructions are traced on Python 3.11")
def test_putting_in_order_may_be_interrupted_itself() -> None:
    for number in range(1000):
        controller = begun(Scope.LAYER)
        with pytest.raises(KeyboardInterrupt), Breakpoints(9):
            CHANGES["evict"](controller)
        assert controller.residency.changes
        strike = Breakpoints(number)
        try:
            with strike:
                controller.residency.rebuild()
        except KeyboardInterrupt:
            controller.residency.rebuild()
        check_slots(controller, {key: held.slot for key, held in controller.residency.reserved.items()})
        if not strike.struck:
            assert number > 3
            return
    raise AssertionError("it does not end")
