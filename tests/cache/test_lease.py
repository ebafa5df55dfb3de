"""The lease of a cache: the device has it until the host recalls it, and nothing is lost on the way."""

from __future__ import annotations

import pytest

from hotset import policies
from hotset.cache.controller import Controller
from hotset.cache.lease import CacheLease
from hotset.cache.plan import SlotPlan
from hotset.shape import ExpertKey, ModelShape


class Holder:
    """Notes when it is asked to give the cache back."""

    def __init__(self, fails: int = 0) -> None:
        self.asked, self.fails = 0, fails

    def give_back(self) -> None:
        self.asked += 1
        if self.asked <= self.fails:
            raise KeyboardInterrupt


def test_it_is_given_back_once() -> None:
    lease, holder = CacheLease(), Holder()
    lease.recall()  # the host has it
    assert not lease.held
    lease.take(holder.give_back)
    assert lease.held
    lease.recall()
    lease.recall()
    assert holder.asked == 1
    assert not lease.held


def test_what_was_interrupted_is_done_again() -> None:
    lease, holder = CacheLease(), Holder(fails=1)
    lease.take(holder.give_back)
    with pytest.raises(KeyboardInterrupt):
        lease.recall()
    assert lease.held
    lease.recall()
    assert holder.asked == 2
    assert not lease.held


def test_a_device_that_has_failed_gives_nothing_back() -> None:
    lease, holder = CacheLease(), Holder()
    lease.take(holder.give_back)
    lease.end()
    lease.recall()
    assert holder.asked == 0


def test_it_does_not_keep_its_holder_alive() -> None:
    lease, holder = CacheLease(), Holder()
    lease.take(holder.give_back)
    del holder
    assert not lease.held
    lease.recall()


def test_a_change_of_the_cache_recalls_it_and_an_event_does_not() -> None:
    controller, holder = Controller(SlotPlan(ModelShape(2, 4, 2), 6), policies.parse("lru")), Holder()
    controller.residency.lease.take(holder.give_back)
    controller.preload(controller.table.last + 1.0)
    assert holder.asked == 1
    controller.residency.lease.take(holder.give_back)
    controller.pin([ExpertKey(0, int((controller.table.slot_of[0] >= 0).argmax()))])
    assert holder.asked == 2
