"""Each policy on a sequence short enough to follow with a pencil."""

import math

import numpy as np
import pytest
from event_samples import decode, make_events, one_layer

from hotset.cache import Controller, Scope, SlotPlan
from hotset.policies import parse
from hotset.shape import ModelShape
from hotset.trace import Phase


def replay(spec, events, slots, scope=Scope.LAYER):
    """Misses per event, and the evicted experts, in order."""
    controller = Controller(SlotPlan(events.shape, slots, scope), parse(spec))
    replayed = controller.replay(events, log=True)
    evicted = [(layer, expert) for *_, layer, expert in replayed.log.tolist() if expert >= 0]
    return replayed.misses.tolist(), evicted


def replay_one_layer(spec, asked, slots, experts=8, top_k=1):
    misses, evicted = replay(spec, one_layer(experts, top_k, asked), slots)
    return misses, [expert for _, expert in evicted]


# lru


def test_lru_evicts_the_oldest_use():
    # 2 replaces 1, because 0 was used again since; 1 then replaces 0.
    assert replay_one_layer("lru", [[0], [1], [0], [2], [1]], 2) == ([1, 1, 0, 1, 1], [1, 0])


def test_lru_protects_the_running_event():
    # 0 is older than 1 only by number, but 0 is in use in the second event: 1 is evicted.
    assert replay_one_layer("lru", [[0, 1], [0, 2]], 2, top_k=2) == ([2, 1], [1])


def test_equal_ages_are_evicted_by_number():
    assert replay_one_layer("lru", [[1, 3, 5], [0], [2]], 3, top_k=3) == ([3, 1, 1], [1, 3])


def test_equals_that_were_never_used_are_evicted_by_layer_and_number():
    shape = ModelShape(2, 4, 1)
    controller = Controller(SlotPlan(shape, 3, Scope.POOL), parse("lru"))
    controller.preload(np.array([[0, 0, 1, 0], [2, 3, 0, 0]]))  # assigned as (1, 1), (1, 0), (0, 2)
    log = controller.replay(decode(shape, [(0, [0]), (0, [1]), (0, [3])]), log=True).log
    assert log[:, 3:].tolist() == [[0, 2], [1, 0], [1, 1]]


def test_an_event_wider_than_the_cache_is_staged():
    events = one_layer(6, 1, [[0, 1, 2, 3], [0, 1, 2, 3]])
    controller = Controller(SlotPlan(events.shape, 2), parse("lru"))
    replayed = controller.replay(events, log=True)
    # Equal scores: the lower numbers get slots, the others pass through staging. None is evicted while in use.
    assert replayed.misses.tolist() == [4, 2]
    assert controller.residents() == [(0, 0), (0, 1)]
    assert [row[1] for row in replayed.log.tolist() if row[2] < 0] == [2, 3, 2, 3]


# lfu


ON_OFF = [[0], [0], [1], [2], [1], [2], [0]]


def test_lfu_remembers_the_evicted():
    # 2 replaces 1 (1 use against 2). 1 returns with 2 uses and replaces 2. 2 returns with 2 uses; 0 and 1 have
    # 2 as well, and 0 was used longer ago. So 0 is gone when it is asked for; it has 3 uses now and
    # replaces 1, older than 2.
    assert replay_one_layer("lfu", ON_OFF, 2) == ([1, 0, 1, 1, 1, 1, 1], [1, 2, 0, 1])


def test_lfu_without_history_forgets_the_evicted():
    # 1 and 2 come back with one use each time and replace each other; 0 stays and is hit.
    assert replay_one_layer("lfu:history=off", ON_OFF, 2) == ([1, 0, 1, 1, 1, 1, 0], [1, 2, 1])


def test_lfu_counts_tokens():
    shape = ModelShape(1, 4, 1)
    asked = [({0: 1}, 1), ({1: 3}, 3), ({0: 1}, 1), ({2: 1}, 1)]
    rows = [(0, counts, tokens, Phase.DECODE) for counts, tokens in asked]
    # 0 was used in two events, 1 in one, but by three tokens: 0 is evicted.
    assert replay("lfu", make_events(shape, rows), 2) == ([1, 1, 0, 1], [(0, 0)])


# lfru


def test_lfru_weighs_uses_by_age():
    # In pass 6, 0 is worth 3 / (3 + 1) and 1 is worth 2 / (1 + 1): 0 is evicted although it was used more.
    assert replay_one_layer("lfru", [[0], [0], [0], [1], [1], [2]], 2)[1] == [0]
    # In pass 6, 0 is worth 4 / (2 + 1) and 1 is worth 1 / (1 + 1): 1 is evicted although it was used last.
    assert replay_one_layer("lfru", [[0], [0], [0], [0], [1], [2]], 2)[1] == [1]


# class_lru


def test_class_lru_divides_the_age_by_the_class_of_the_uses():
    # 0 has 3 uses, less a little: class 1, of 2 to 4. In token 5 it is 2 tokens old and 1 is one: 2 / 2 is 1 / 1, and
    # of equals the older is evicted. Used a token later, it is 1 / 2 old, and 1 is 4.
    assert replay_one_layer("class_lru", [[0], [0], [0], [1], [2]], 2)[1] == [0]
    assert replay_one_layer("class_lru", [[1], [0], [0], [0], [2]], 2)[1] == [1]
    # 5 uses are class 2: 3 / 4 is less than 2 / 1, although 0 was used before 1.
    assert replay_one_layer("class_lru", [[0]] * 5 + [[1], [2], [3]], 3)[1] == [1]
    assert replay_one_layer("lru", [[0]] * 5 + [[1], [2], [3]], 3)[1] == [0]


def test_class_lru_takes_the_class_of_the_last_use_and_forgets_at_128_tokens():
    shape = ModelShape(1, 4, 1)
    rows = [(0, {0: 8}, 8, Phase.PREFILL), (0, {3: 128}, 128, Phase.PREFILL), (0, {0: 1}, 1, Phase.DECODE)]
    controller = Controller(SlotPlan(shape, 2), parse("class_lru"))
    events = make_events(shape, rows)
    controller.replay(events.slice(0, 2))
    assert controller.state.weight[0].tolist() == [8, 1, 1, 128]  # 128 tokens later 0 would have 4, and keeps its class
    controller.replay(events.slice(2, 3))
    assert controller.state.uses[0, 0] == pytest.approx(8 * 0.5 ** (129 / 128) + 1)
    assert controller.state.weight[0, 0] == 4
    assert controller.state.clock.tolist() == [137]


def test_class_lru_remembers_the_evicted():
    # In token 6, 0 is 2 / 2 old and 1 is 1 / 1: 0 is evicted. It comes back with its 4 uses and one more, of class 2,
    # and so survives 3 in token 9: 2 / 4 against 1 / 1. lru evicts it there.
    asked = [*[[0]] * 4, [1], [2], [0], [3], [4]]
    assert replay_one_layer("class_lru", asked, 2) == ([1, 0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 2, 3])
    assert replay_one_layer("lru", asked, 2)[1] == [0, 1, 2, 0]


def test_class_lru_has_eight_classes():
    shape = ModelShape(1, 2, 1)
    controller = Controller(SlotPlan(shape, 2), parse("class_lru"))
    controller.replay(make_events(shape, [(0, {0: 1000, 1: 1}, 1000, Phase.PREFILL)]))
    assert controller.state.weight[0].tolist() == [128, 1]


def test_class_lru_ages_by_the_tokens_of_its_own_layer():
    shape = ModelShape(2, 3, 1)
    rows = [(0, [0]), (1, [0]), (1, [1]), (1, [2])]
    # In a pool of 2, layer 0 stood still, so its expert has no age at all: layer 1 replaces its own.
    assert replay("class_lru", decode(shape, rows), 2, Scope.POOL)[1] == [(1, 0), (1, 1)]


# decay


def test_decay_forgets_at_its_half_life():
    asked = [[0], [0], [0], [1], [2]]
    # In pass 5 at half-life 1, 0 is worth 1/16 + 1/8 + 1/4 and 1 is worth 1/2. At half-life 16, about 2.6 and 0.96.
    assert replay_one_layer("decay:half_life=1", asked, 2)[1] == [0]
    assert replay_one_layer("decay:half_life=16", asked, 2)[1] == [1]


def test_decay_ages_by_the_passes_of_its_own_layer():
    shape = ModelShape(2, 3, 1)
    rows = [(0, [0]), (1, [0]), (1, [1]), (1, [0]), (1, [2])]
    # Layer 0 stood still, so its expert is as fresh as ever. In layer 1, 1 is worth 1/4 and 0 is worth 1/8 + 1/2.
    assert replay("decay:half_life=1", decode(shape, rows), 3, Scope.POOL)[1] == [(1, 1)]


def state_after(spec, asked, experts=2):
    """The policy's state after the events of one layer."""
    events = one_layer(experts, 1, asked)
    controller = Controller(SlotPlan(events.shape, 1), parse(spec))
    controller.replay(events)
    return controller.state


@pytest.mark.parametrize(
    ("asked", "half_life"),
    [
        ([[0]], 16),  # nothing is known: all say one half
        ([[0], [1]], 2),  # who forgot most of 0 is least surprised by 1
        ([[0], [0]], 256),  # who remembers 0 best is least surprised by 0
        ([[0], [0], [1]], 2),  # one large surprise outweighs the small difference before
    ],
)
def test_decay_takes_the_half_life_that_predicts_best(asked, half_life):
    state = state_after("decay:half_life=auto", asked)
    assert state.half_life[state.chosen[0]] == half_life


def test_decay_is_surprised_in_bits_per_use():
    # First 1 bit: two experts, nothing known. Then 1 is asked for, which has only the 0.03 that everyone is granted,
    # while 0 has one use, aged by one pass to 1 / sqrt(2), and its own 0.03.
    state = state_after("decay:half_life=auto", [[0], [1]])
    second = -math.log2(0.03 / (1 / math.sqrt(2) + 0.06))
    at_two = state.surprise[state.half_life.tolist().index(2)]
    assert at_two == pytest.approx(1 / 150 + (second - 1 / 150) / 150, abs=1e-15)


@pytest.mark.parametrize("spec", ["decay:half_life=auto", "window:tokens=auto"])
def test_a_prompt_is_counted_and_not_judged(spec):
    shape = ModelShape(1, 4, 1)
    rows = [(0, {0: 3, 1: 1}, 3, Phase.PREFILL), (0, {2: 2}, 2, Phase.PREFILL)]
    controller = Controller(SlotPlan(shape, 2), parse(spec))
    controller.replay(make_events(shape, rows))
    assert not controller.state.surprise.any()


# window


def test_window_drops_old_passes():
    # The last 2 tokens are 1 and 2: of 0's three uses none counts any more.
    assert replay_one_layer("window:tokens=2", [[0], [0], [0], [1], [2]], 2)[1] == [0]
    assert replay_one_layer("window:tokens=9", [[0], [0], [0], [1], [2]], 2)[1] == [1]


def test_window_takes_a_long_prompt_in_proportion():
    shape = ModelShape(1, 4, 1)
    rows = [(0, {3: 1}, 1, Phase.DECODE), (0, {0: 8, 1: 2}, 8, Phase.PREFILL)]
    controller = Controller(SlotPlan(shape, 2), parse("window:tokens=4"))
    controller.replay(make_events(shape, rows))
    # 8 tokens shrink to the window's 4, which also push out the pass before.
    assert controller.state.uses.tolist() == [[[4.0, 1.0, 0.0, 0.0]]]


@pytest.mark.parametrize(
    ("asked", "window"),
    [
        ([[0]] * 16 + [[1]], 64),  # all windows hold the same sixteen, and are surprised alike
        ([[0]] * 16 + [[1]] * 2, 16),  # the shortest has let one 0 go for the first 1
        ([[0]] * 18, 64),  # the shortest holds sixteen of seventeen and is a little less sure; the others are equal
    ],
)
def test_window_takes_the_size_that_predicts_best(asked, window):
    state = state_after("window:tokens=auto", asked)
    assert state.window[state.chosen[0]] == window


# slru


def test_slru_survives_a_scan():
    # Half of 2 slots is protected. 0 and 1 are both promoted by their second use; 1 pushes 0 back on probation.
    # The scan 2, 3, 4 then turns over the one probationary slot, and 1 is still there.
    asked = [[0], [1], [0], [1], [2], [3], [4], [1]]
    assert replay_one_layer("slru:protected=0.5", asked, 2) == ([1, 1, 0, 0, 1, 1, 1, 0], [0, 2, 3])
    assert replay_one_layer("lru", asked, 2)[0][-1] == 1


def test_slru_demotes_to_the_recent_end_of_probation():
    # One of 3 slots is protected. 0 is promoted at 3 and pushed back by 1 at 5, as the most recent on probation.
    # So 2, on probation since 4, is evicted first, although it was used after 0; lru drops 0.
    asked = [[0], [1], [0], [2], [1], [3], [0]]
    assert replay_one_layer("slru:protected=0.34", asked, 3) == ([1, 1, 0, 1, 0, 1, 0], [2])
    assert replay_one_layer("lru", asked, 3)[1] == [0, 2]


def test_slru_hint_lets_uses_decide_on_probation():
    # Nothing is protected. 0 has three uses, 1 only one, but 0 entered its segment earlier.
    asked = [[0], [0], [0], [1], [2]]
    assert replay_one_layer("slru:protected=0", asked, 2)[1] == [0]
    assert replay_one_layer("slru:protected=0,hint=on", asked, 2)[1] == [1]


def test_slru_hint_forgets():
    # In pass 5 at half-life 1, 0 is worth 1/16 + 1/8 + 1/4 and 1 is worth 1/2; without forgetting, 3 and 1.
    asked = [[0], [0], [0], [1], [2]]
    assert replay_one_layer("slru:protected=0,hint=on,hint_half_life=1", asked, 2)[1] == [0]
    assert replay_one_layer("slru:protected=0,hint=on,hint_half_life=inf", asked, 2)[1] == [1]


def test_equals_are_demoted_by_expert_not_by_slot():
    # 0 and 1 are promoted by the same event into a protected segment of one: which of them goes back must not depend on
    # who sat down first.
    ends = [[0, 1], [2], [3]]
    one = replay_one_layer("slru:protected=0.34", [[0], [1], *ends], 3)
    two = replay_one_layer("slru:protected=0.34", [[1], [0], *ends], 3)
    assert one == two


# layered


def sweep(layers, passes):
    """The same expert of every layer, token after token: a cyclic scan of the pool."""
    shape = ModelShape(layers, 4, 1)
    return decode(shape, [(layer, [0]) for _ in range(passes) for layer in range(layers)])


def test_a_pool_below_one_cycle_gets_nothing_from_lru():
    # 2 slots, 3 experts per token: lru drops each expert just before its turn.
    assert replay("lru", sweep(3, 4), 2, Scope.POOL)[0] == [1] * 12


def test_layered_avoids_the_cliff():
    # All are equally stale, so the one whose layer's turn is furthest is evicted: layer 1 when 2 comes, 0 when 1
    # comes, 2 when 0 comes. From the second token on every other expert is hit.
    misses, evicted = replay("layered", sweep(3, 4), 2, Scope.POOL)
    assert misses == [1, 1, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert [layer for layer, _ in evicted] == [1, 0, 2, 1, 0]


def test_a_sweep_freezes_when_equals_are_refused():
    # lfu lets equals replace each other, and so sweeps itself out like lru. Deciding late keeps whom it has: the first
    # two layers are frozen in, and hit from then on.
    assert replay("lfu", sweep(3, 3), 2, Scope.POOL)[0] == [1] * 9
    assert replay("lfu:admit=late", sweep(3, 3), 2, Scope.POOL) == ([1, 1, 1, 0, 0, 1, 0, 0, 1], [])


def test_layered_is_lru_when_slots_belong_to_layers():
    rng = np.random.default_rng(0)
    shape = ModelShape(3, 6, 2)
    rows = [(i % 3, rng.choice(6, 2, replace=False).tolist()) for i in range(300)]
    assert replay("layered", decode(shape, rows), 9) == replay("lru", decode(shape, rows), 9)


# pools


def test_a_floor_holds_against_other_layers_only():
    # 2 layers x (1 + 1) fit in 4 slots, so each layer has a floor of 2. Layer 0 takes all four; layer 1 takes two
    # of them back (oldest first), then layer 0 is at its floor and layer 1 must replace its own.
    shape = ModelShape(2, 4, 1)
    rows = [(0, [0]), (0, [1]), (0, [2]), (0, [3]), (1, [0]), (1, [1]), (1, [2]), (0, [0])]
    assert replay("lru", decode(shape, rows), 4, Scope.POOL)[1] == [(0, 0), (0, 1), (1, 0), (0, 2)]


# belady


def test_belady_passes_by_what_is_not_asked_for_again():
    # 1 never returns, so giving it the only slot would cost 0's hit.
    assert replay_one_layer("belady", [[0], [1], [0]], 1) == ([1, 1, 0], [])
    assert replay_one_layer("belady:bypass=off", [[0], [1], [0]], 1) == ([1, 1, 1], [0, 1])


def test_belady_drops_the_furthest():
    # At 2's turn: 0 returns at 4, 1 at 5, 2 at 3. 1 is evicted, returns, and by then nothing has a future.
    asked = [[0], [1], [2], [2], [0], [1]]
    assert replay_one_layer("belady", asked, 2) == ([1, 1, 1, 0, 0, 1], [1])


def test_belady_may_let_the_running_event_go():
    # Both slots are worth more in the hands of 0 and 2: 1, hit in the second event, is evicted for 2 at once.
    asked = [[0, 1], [1, 2], [0], [2], [1]]
    assert replay_one_layer("belady", asked, 2, top_k=2) == ([2, 1, 0, 0, 1], [1])


# static


def test_static_keeps_the_first_that_come():
    assert replay_one_layer("static", [[0], [1], [2], [2], [2], [0]], 2) == ([1, 1, 1, 1, 1, 0], [])


def test_static_keeps_the_given_set():
    shape = ModelShape(1, 4, 1)
    controller = Controller(SlotPlan(shape, 2), parse("static"))
    controller.state.counts[0] = [1, 0, 5, 7]
    assert controller.preload(controller.state.counts) == 2
    misses = controller.replay(one_layer(4, 1, [[0], [0], [2], [3]])).misses
    assert misses.tolist() == [1, 1, 0, 0]
    assert controller.residents() == [(0, 2), (0, 3)]
    assert controller.state.counts[0].tolist() == [3, 0, 6, 8]


# prefill


def test_a_prompt_fills_empty_slots_and_evicts_nothing():
    shape = ModelShape(1, 6, 1)
    rows = [
        (0, {0: 1}, 1, Phase.DECODE),
        (0, {1: 2, 2: 5, 3: 1}, 6, Phase.PREFILL),  # one slot is empty, and 2 is used most
        (0, {0: 1, 2: 1}, 1, Phase.DECODE),
        (0, {1: 1}, 1, Phase.DECODE),  # the prompt was counted: 0 has 2 uses, 1 has 3, 2 has 6
    ]
    assert replay("lfu", make_events(shape, rows), 2) == ([1, 3, 0, 1], [(0, 0)])


# blend


def test_blend_begins_as_a_sum_of_rates():
    controller = Controller(SlotPlan(ModelShape(1, 4, 1), 2), parse("blend"))
    controller.replay(one_layer(4, 1, [[2]]))
    # After one pass a rate of half-life h is 1 - 2^(-1/h), the all-time rate is 1, and nothing is learnt yet.
    used = -4 + sum(math.sqrt(1 - 0.5 ** (1 / h)) for h in (1, 3, 8, 24, 72, 240)) + 1
    assert controller.state.value[0, :4].tolist() == pytest.approx([-4, -4, used, -4])


def test_blend_keeps_the_hot_ones_through_a_scan():
    # 0 and 1 run all the time; 2 to 7 come once each and find no slot.
    asked = [[0, 1]] * 30 + [[0, expert] for expert in range(2, 8)] + [[0, 1]]
    misses, evicted = replay_one_layer("blend", asked, 2, top_k=2)
    assert misses == [2] + [0] * 29 + [1] * 6 + [0]
    assert evicted == []


def test_blend_learns_what_follows():
    asked = [[i % 4] for i in range(400)]
    controller = Controller(SlotPlan(ModelShape(1, 4, 1), 2), parse("blend:transitions=on"))
    controller.replay(one_layer(4, 1, asked))
    assert int(np.argmax(controller.state.value[0, :4])) == 0  # after 3 comes 0
