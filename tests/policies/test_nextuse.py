"""The next use by hand: streams, targets, discount, recall, starts, and how many of its own an event may evict."""

import math
from itertools import chain

import numpy as np
import pytest
from event_samples import decode, one_layer, random_requests
from slow_nextuse import logistic, signature_of

from hotset.cache import Controller, SlotPlan
from hotset.policies import parse
from hotset.shape import ModelShape
from hotset.trace import Phase, Trace

RATES = slice(0, 7)
NEXT, SOON, LATER, NEXT_OF_PAIR = 12, 13, 14, 15  # features
BIAS, MEAN, LIFT = -1.87, -1.17, 0.26  # weights to begin with


def steps_of(experts, steps, top_k=1, phase=Phase.DECODE):
    """Events of one layer: each step names (request, its experts) for every token."""
    rows = list(chain.from_iterable(steps))
    chosen = np.array([[some] for _, some in rows], np.int16)
    step = np.repeat(np.arange(len(steps)), [len(tokens) for tokens in steps]).astype(np.int32)
    request = np.array([whose for whose, _ in rows], np.int32)
    return Trace(
        ModelShape(1, experts, top_k), chosen, request, step, np.full(len(rows), int(phase), np.uint8)
    ).events()


def one_request(experts, asked, top_k=1):
    return steps_of(experts, [[(0, some)] for some in asked], top_k)


def controller_of(events, slots=None, spec="nextuse"):
    return Controller(SlotPlan(events.shape, slots or events.shape.experts), parse(spec))


def after(events, slots=None, spec="nextuse"):
    """The policy's state after these events."""
    controller = controller_of(events, slots, spec)
    controller.replay(events)
    return controller.state


# streams


def test_two_streams_keep_their_own_last_experts():
    state = after(steps_of(4, [[(0, [0]), (1, [3])]]))
    assert state.owner[:3].tolist() == [0, 1, -1]
    assert state.routes[:2, 0].tolist() == [[0], [3]]
    # Both begin at the common rates of one half for 0 and 3; of half-life 1, a pass brings each half way to its own.
    assert state.rates[:2, 0, 0, :4].tolist() == [[0.75, 0, 0, 0.25], [0.25, 0, 0, 0.75]]
    value = state.value[:2, 0]
    assert value[0, 0] == value[1, 3] > value[0, 3] == value[1, 0]
    # The score is that either uses it, so both experts are worth the same, and more than the others.
    assert state.worth[0, 0] == state.worth[0, 3] > state.worth[0, 1] == state.worth[0, 2]
    unused = (1 - logistic(float(value[0, 0]))) * (1 - logistic(float(value[1, 0])))
    assert state.worth[0, 0] == pytest.approx(-unused, abs=1e-6)


def test_only_transitions_within_a_request_are_counted():
    state = after(steps_of(4, [[(0, [0]), (1, [3])], [(0, [1]), (1, [2])]]))
    assert np.argwhere(state.follows[0]).tolist() == [[0, 1], [3, 2]]
    assert state.followed[0].tolist() == [1, 0, 0, 1]


def test_more_requests_than_streams_share_one():
    steps = [[(0, [0]), (1, [1]), (2, [2])]] * 4
    state = after(steps_of(4, steps), spec="nextuse:streams=2")
    assert state.owner.tolist() == [0, 1]  # 2 is served by 2 % 2, and owns none
    assert state.passes.tolist() == [4, 4]
    # Of the tokens of stream 0 the last is followed, and the one before counts in its rates: never a transition.
    assert state.routes[:, 0].tolist() == [[2], [1]]
    assert state.followed[0].tolist() == [0, 3, 0, 0]
    assert state.seen[:, 0].tolist() == [64 + 8, 64 + 4]


def test_a_new_request_takes_the_stream_that_was_served_longest_ago():
    steps = [[(0, [0])], [(1, [1])], [(0, [0])], [(2, [2])]]
    assert after(steps_of(4, steps), spec="nextuse:streams=2").owner.tolist() == [0, 2]


def test_a_stream_that_has_ended_does_not_count():
    # 1 was in every step, then in two no more: what it used is worth what stream 0 makes of it.
    both, one = [(0, [0]), (1, [3])], [(0, [0])]
    state = after(steps_of(4, [both, both, one]))
    alone = logistic(float(state.value[0, 0, 3]))
    assert state.worth[0, 3] == pytest.approx(alone - 1, abs=1e-6)


def test_a_request_that_begins_starts_from_the_common_rates():
    state = after(steps_of(4, [[(0, [0])], [(0, [1])], [(1, [0])]]))
    # Of three tokens two used 0 and one 1. Then the pass itself: half of the way at half-life 1, one of 65 tokens ever.
    assert state.rates[1, 0, 0, :3] == pytest.approx([5 / 6, 1 / 6, 0])
    assert state.rates[1, 0, 6, :3] == pytest.approx([2 / 3 + 1 / 3 / 65, 1 / 3 - 1 / 3 / 65, 0])
    assert not state.followed[0, 1]  # nothing follows the last token of another request


def test_the_end_of_a_prompt_is_taken_token_by_token():
    prompt = [[(0, [n % 3]) for n in range(70)]]
    state = after(steps_of(4, prompt, phase=Phase.PREFILL))
    assert state.passes[0] == 64
    assert state.followed[0].tolist() == [21, 21, 21, 0]  # 63 transitions
    assert state.seen[0, 0] == 64 + 70
    assert state.clock[0] == 0  # no decode pass


# features and targets


def test_a_place_that_was_met_before_says_what_followed():
    asked = [[expert] for expert in (0, 1, 2, 3, 4, 5, 6, 0)]
    x = after(one_request(8, asked)).features[0, 0]
    assert x[NEXT, :8].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert x[SOON, :8] == pytest.approx([0, 0, 0.333, 0.333, 0.333, 0, 0, 0])
    assert x[LATER, :8].tolist() == [0, 0, 0, 0, 0, 0.125, 0.125, 0]
    assert not x[NEXT_OF_PAIR : NEXT_OF_PAIR + 3].any()  # 0 never came after 6 before
    x = after(one_request(8, [*asked, [1]])).features[0, 0]
    assert np.flatnonzero(x[NEXT]).tolist() == np.flatnonzero(x[NEXT_OF_PAIR]).tolist() == [2]  # but 1 after 0


def test_nothing_is_recalled_beyond_sixteen_passes():
    asked = [[0]] + [[expert] for expert in range(1, 20)] + [[0]]
    assert len({signature_of(some) for some in asked}) == 20
    x = after(one_request(20, asked)).features[0, 0]
    assert np.flatnonzero(x[LATER]).tolist() == list(range(5, 17))


SEEN_TWICE = one_request(2, [[0], [0]])


def test_the_target_of_an_unused_expert_is_its_own_discounted_prediction():
    # After one pass of 0, all rates of 0 are 1 and those of 1 are 0; nothing followed 0 yet, so 1 is expected at its
    # common rate and the thousandth that everyone is granted. After two, 0 has followed 0 once.
    first = [
        0.56 - 0.34 + 1.04 + 1.58 + 0.8 - 1.1 + 1.12 + 0.12 - 1.09 + MEAN * math.sqrt(1.001) + BIAS,
        MEAN * math.sqrt(0.001) + BIAS,
    ]
    second = MEAN * math.sqrt(0.0008) + LIFT * (0.0008 - 0.001) / (0.0008 + 0.001) + BIAS
    before = after(SEEN_TWICE.slice(0, 1))
    assert before.value[0, 0, :2] == pytest.approx(first, abs=1e-5)
    state = after(SEEN_TWICE)
    assert state.value[0, 0, 1] == pytest.approx(second, abs=1e-5)
    # One resident, and 0.98 missing per pass by now: the first pass missed one, as many as were expected.
    stay = math.sqrt(1 / 0.98)
    surprise = [1 - logistic(first[0]), stay / (1 + stay) * logistic(second) - logistic(first[1])]
    # Rows are new, so they learn five times as fast: 0.01 x (1 + 4).
    assert state.context[0, 0, :2] == pytest.approx([0.05 * some for some in surprise], abs=1e-6)
    # Weights begin with an energy of 0.001; what is left of it after a step is 0.98 of that, and the gradient's square.
    gradient = sum(surprise) / 2
    step = 0.01 * gradient / math.sqrt(0.98e-3 + gradient**2)
    assert state.shared[10] == pytest.approx(LIFT)  # lift was 0 in the first pass
    assert state.shared[11] == pytest.approx(BIAS + step, abs=1e-6)
    assert state.own[0, 11] == pytest.approx(step, abs=1e-6)


@pytest.mark.parametrize(("missing_per_pass", "discount"), [(4, 1 / 2), (1, 2 / 3), (0.25, 4 / 5)])
def test_the_discount_is_larger_where_residents_stay_longer(missing_per_pass, discount):
    # Four residents: q is 1, 2 and 4, and g is q / (1 + q).
    events = one_request(8, [[0, 1, 2, 3], [0, 1, 2, 3]], top_k=4)
    controller = controller_of(events, slots=4)
    controller.replay(events.slice(0, 1))
    before = float(controller.state.value[0, 0, 7])
    controller.state.churn[0] = missing_per_pass / 0.98  # the second event misses nothing, and counts for 0.02
    controller.replay(events.slice(1, 2))
    target = discount * logistic(float(controller.state.value[0, 0, 7]))
    assert controller.state.context[0, 0, 7] == pytest.approx(0.05 * (target - logistic(before)), abs=1e-7)


def test_in_turns_a_stay_is_counted_in_passes_of_the_stream_and_weights_learn_more_slowly():
    # Four requests take turns, so that from one pass of a stream to its next there are four of all.
    turns = [[(request, [request])] for _ in range(40) for request in range(4)]
    events = steps_of(8, turns)
    controller = controller_of(events, slots=4)
    controller.replay(events.slice(0, 156))
    state = controller.state
    assert state.gap[0] == pytest.approx(4, abs=1e-3)
    before, weight, energy = float(state.value[0, 0, 7]), float(state.shared[11]), float(state.shared_energy[11])
    predicted, learnt, row = state.value[0, 0].copy(), float(state.learnt[0, 0]), float(state.context[0, 0, 7])
    state.churn[0] = 0.25 / 0.98  # four residents stay for 16 passes: 4 of its own, whose root is 2
    controller.replay(events.slice(156, 157))
    target = [1.0 if e == 0 else 2 / 3 * logistic(float(state.value[0, 0, e])) for e in range(8)]
    surprise = [some - logistic(float(predicted[e])) for e, some in enumerate(target)]
    assert target[7] - logistic(before) == pytest.approx(surprise[7])
    pace = 0.01 * (1 + 4 / (1 + learnt / 8))
    assert state.context[0, 0, 7] - row == pytest.approx(pace * surprise[7], rel=1e-3)
    gradient = sum(surprise) / 8
    step = 0.01 / math.sqrt(4) * gradient / math.sqrt(0.98 * energy + gradient**2 + 1e-12)
    assert state.shared[11] - weight == pytest.approx(step, rel=1e-2)


def test_without_routes_it_scores_by_the_common_rates():
    events = one_layer(4, 1, [[0], [0], [1]])
    assert events.routed is None
    assert after(events).worth[0, :4] == pytest.approx([2 / 3 - 1, 1 / 3 - 1, -1, -1])


# late


@pytest.mark.parametrize(
    ("staging", "asked", "evicted"),
    [
        (0, [0, 1, 2, 3, 4, 5], [0, 1, 2]),  # nobody says how it is computed
        (1, [0, 1, 2, 3, 4, 5], []),  # the one row is for what gets no slot
        (3, [0, 1, 2, 3, 4, 5], [0, 1]),
        (4, [0, 1, 2, 3, 4, 5], [0, 1, 2]),
        (2, [0, 1, 3, 4, 5], [2, 0]),  # 2 is not used now, and takes nobody's row
        (2, [3, 4, 5], [2, 0, 1]),
    ],
)
def test_late_evicts_no_more_of_an_event_than_there_is_staging_for(staging, asked, evicted):
    controller = Controller(SlotPlan(ModelShape(1, 6, 2), 3, staging=staging), parse("lfu:admit=late"))
    controller.preload(np.array([[3, 2, 1, 0, 0, 0]]))
    controller.state.uses[0] = [2, 3, 1, 9, 9, 9]
    if 2 in asked:
        controller.state.uses[0, 2] = 4
    log = controller.replay(decode(ModelShape(1, 6, 2), [(0, asked)]), log=True).log
    assert [row[4] for row in log.tolist() if row[4] >= 0] == evicted
    assert np.count_nonzero(log[:, 2] >= 0) == len(evicted)


# saved and restored


@pytest.mark.parametrize("spec", ["nextuse", "nextuse:streams=2,passes=20"])
def test_a_restored_state_goes_on_bit_for_bit(spec):
    rng = np.random.default_rng(3)
    events = random_requests(rng, ModelShape(3, 8, 2), 40)
    half, plan = len(events) // 2, SlotPlan(events.shape, 9, staging=3)
    one, two = (Controller(plan, parse(spec)) for _ in range(2))
    one.replay(events.slice(0, half))
    saved = {name: array.copy() for name, array in one.save().items()}
    for mine, theirs in zip(two.table, one.table, strict=True):
        np.copyto(mine, theirs)
    rest = events.slice(half, len(events))
    expected = one.replay(rest, log=True).log
    two.restore(saved)
    np.testing.assert_array_equal(two.replay(rest, log=True).log, expected)
    for name, array in one.save().items():
        np.testing.assert_array_equal(two.save()[name], array, err_msg=name)
