"""Pins stay for good, may not starve the rest, and can be unpinned."""

import pytest

from hotset.cache import Controller, Scope, SlotPlan
from hotset.errors import BudgetError, HotsetError
from hotset.policies import parse
from hotset.shape import ExpertKey, ModelShape
from hotset.trace import Event, Phase

SHAPE = ModelShape(2, 8, 2)


def make(slots=8, scope=Scope.LAYER, policy="lru"):
    return Controller(SlotPlan(SHAPE, slots, scope), parse(policy))


def ask(controller, layer, *experts):
    return controller.serve(Event(0, layer, experts, (1,) * len(experts), 1, Phase.DECODE))


def test_a_pin_takes_an_empty_slot_and_is_hit():
    controller = make()
    controller.pin([(0, 5), (1, 7)])
    assert controller.pins() == controller.residents() == [ExpertKey(0, 5), ExpertKey(1, 7)]
    assert ask(controller, 0, 4, 5).hits == 1
    assert controller.table.num_pinned.tolist() == [1, 1]


def test_a_pin_outlives_everything():
    controller = make(slots=6)  # 3 slots per layer, one of them pinned
    controller.pin([(0, 0)])
    for expert in (1, 3, 5, 1, 3, 5):
        ask(controller, 0, expert, expert + 1)
    assert ask(controller, 0, 0).hits == 1


def test_a_resident_can_be_pinned_in_a_full_cache():
    controller = make(slots=6)
    for pair in ((0, 1), (2, 3), (4, 5)):
        ask(controller, 0, *pair)
    resident = controller.residents()[0]
    controller.pin([resident])
    for pair in ((0, 1), (6, 7), (2, 3)):
        ask(controller, 0, *pair)
    assert resident in controller.residents()


def test_pins_that_starve_a_layer_are_refused():
    controller = make(slots=8)  # 4 slots per layer, 2 for the running event
    with pytest.raises(BudgetError, match=r"3 pins starve layer 1: of its 4 slots, 2 must stay free .* pin at most 2"):
        controller.pin([(1, 0), (1, 1), (1, 2)])
    assert controller.pins() == controller.residents() == []
    controller.pin([(1, 0), (1, 1), (0, 0), (0, 1)])
    assert len(controller.pins()) == 4


def test_earlier_pins_count():
    controller = make(slots=8)
    controller.pin([(0, 0), (0, 1)])
    controller.pin([(0, 0)])  # pinning twice asks for nothing more
    with pytest.raises(BudgetError, match="3 pins starve layer 0"):
        controller.pin([(0, 2)])
    assert len(controller.pins()) == 2


def test_a_pool_counts_the_pins_of_all_layers():
    controller = make(slots=5, scope=Scope.POOL)
    with pytest.raises(BudgetError, match="4 pins starve the pool: of its 5 slots, 2 must stay free"):
        controller.pin([(0, 0), (0, 1), (1, 0), (1, 1)])
    controller.pin([(0, 0), (0, 1), (1, 0)])
    assert controller.table.num_pinned.tolist() == [3]


def test_no_pin_fits_where_a_layer_holds_no_more_than_an_event():
    with pytest.raises(BudgetError, match=r"1 pins starve layer 1: of its 1 slots, 2 must stay free .* pin at most 0"):
        make(slots=3).pin([(1, 0)])


def test_a_pin_that_finds_no_empty_slot_is_refused():
    controller = make(slots=6)
    ask(controller, 0, 0, 1)
    ask(controller, 0, 2, 3)
    with pytest.raises(BudgetError, match="1 experts to pin find no empty slot"):
        controller.pin([(0, 7)])
    assert controller.pins() == []


def test_refused_pins_change_nothing():
    controller = make(slots=8)
    ask(controller, 0, 0, 1)
    ask(controller, 0, 2)  # one of layer 0's four slots is empty
    before = controller.residents()
    with pytest.raises(BudgetError, match="1 experts to pin find no empty slot"):
        controller.pin([(0, 6), (0, 7)])
    assert controller.pins() == []
    assert controller.residents() == before


def test_an_expert_that_does_not_exist_is_refused():
    with pytest.raises((HotsetError, IndexError)):
        make().pin([(0, -1)])


def test_unpinned_experts_leave_again():
    controller = make(slots=6)
    controller.pin([(0, 0)])
    controller.unpin([(0, 0), (1, 3)])  # what was never pinned is left alone
    assert controller.pins() == []
    assert controller.table.num_pinned.tolist() == [0, 0]
    assert controller.residents() == [(0, 0)]
    for pair in ((1, 2), (3, 4), (5, 6)):
        ask(controller, 0, *pair)
    assert (0, 0) not in controller.residents()


@pytest.mark.parametrize("scope", Scope)
def test_events_wider_than_what_pins_leave_are_staged(scope):
    controller = make(slots=6, scope=scope)
    controller.pin([(0, 0)])
    served = ask(controller, 0, *range(1, 8))
    staged = [load for load in served.loads if load.slot is None]
    assert len(staged) == 7 - (2 if scope is Scope.LAYER else 5)
    assert controller.pins() == [(0, 0)]


def test_preload_takes_the_best_first():
    controller = make(slots=4)
    scores = controller.table.last.astype(float)
    scores[0, :4] = [1, 4, 2, 3]
    scores[1, 6] = 0.5
    assert controller.preload(scores) == 3
    assert controller.residents() == [(0, 1), (0, 3), (1, 6)]
