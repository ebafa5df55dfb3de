"""A change of the slot table that is broken off anywhere is put in order: every slot has one owner again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from live_samples import cache_of
from test_landing import check_slots

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "trust"))

from breakpoints import SUPPORTED, Breakpoints

from hotset.cache import Scope
from hotset.cache.landing import Landing
from hotset.shape import ExpertKey, ModelShape

SHAPE = ModelShape(2, 6, 2)
HERE, COMING, NEW = ExpertKey(0, 1), ExpertKey(0, 2), ExpertKey(0, 3)
OWNER = object()

CHANGES: dict[str, Callable[[Landing], object]] = {
    "hold": lambda landing: landing.hold(NEW, OWNER),
    "seat": lambda landing: landing.seat(COMING, landing.controller.coming[COMING].slot),
    "seat and pin": lambda landing: landing.seat(COMING, landing.controller.coming[COMING].slot, pin=True),
    "give back": lambda landing: landing.give_back_all(OWNER),
    "evict": lambda landing: landing.hold_all([NEW, ExpertKey(0, 4), ExpertKey(0, 5)], evict=True, owner=OWNER),
    "drop": lambda landing: landing.controller.drop([HERE, ExpertKey(0, 0)]),
    "pin": lambda landing: landing.controller.pin([HERE]),
    "unpin": lambda landing: landing.controller.unpin([ExpertKey(1, 0)]),
}


def begun(scope: Scope) -> Landing:
    landing = Landing(cache_of(SHAPE, 10, "lru", scope))
    for key in (ExpertKey(0, 0), HERE, ExpertKey(1, 0), ExpertKey(1, 4)):
        slot = landing.hold(key)
        assert slot is not None
        landing.seat(key, slot)
    landing.controller.pin([ExpertKey(1, 0)])
    assert landing.hold(COMING, OWNER) is not None
    return landing


@pytest.mark.skipif(not SUPPORTED, reason="instructions are traced on Python 3.11")
@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("name", CHANGES)
def test_an_interrupt_at_any_place_is_put_in_order(name: str, scope: Scope) -> None:
    for number in range(1000):
        landing = begun(scope)
        strike = Breakpoints(number)
        try:
            with strike:
                CHANGES[name](landing)
        except KeyboardInterrupt:
            controller = landing.controller
            controller.rebuild()
            check_slots(controller, {key: held.slot for key, held in controller.coming.items()})
            landing.give_back_all(OWNER)
            check_slots(controller, {})
            assert (controller.table.last[COMING] == 0) == (COMING not in controller.pins())
        if not strike.struck:
            assert number > 3, "nothing was interrupted"
            return
    raise AssertionError("the change does not end")


@pytest.mark.skipif(not SUPPORTED, reason="instructions are traced on Python 3.11")
def test_putting_in_order_may_be_interrupted_itself() -> None:
    for number in range(1000):
        landing = begun(Scope.LAYER)
        with pytest.raises(KeyboardInterrupt), Breakpoints(9):
            CHANGES["evict"](landing)
        assert landing.controller.changes
        strike = Breakpoints(number)
        try:
            with strike:
                landing.controller.rebuild()
        except KeyboardInterrupt:
            landing.controller.rebuild()
        controller = landing.controller
        check_slots(controller, {key: held.slot for key, held in controller.coming.items()})
        if not strike.struck:
            assert number > 3
            return
    raise AssertionError("it does not end")
