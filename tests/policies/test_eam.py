"""Activation-aware caching on sequences short enough to follow with a pencil, and against the slow model."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from event_samples import make_events, random_budget, random_events, random_shape, random_turns
from numba import njit
from test_against_slow_model import Pair

from hotset.cache import Controller, Scope, SlotPlan
from hotset.errors import PolicyError
from hotset.policies import parse
from hotset.policies.eam import share
from hotset.shape import ModelShape
from hotset.trace import Phase

TWO_BY_FOUR = ModelShape(2, 4, 1)


def requests_of(shape, rows):
    """Decode events given as (request, layer, {expert: tokens})."""
    events = make_events(shape, [(layer, counts, max(counts.values()), Phase.DECODE) for _, layer, counts in rows])
    return replace(events, request=np.array([row[0] for row in rows], np.int32))


def replayed(spec, events, slots, scope=Scope.LAYER):
    controller = Controller(SlotPlan(events.shape, slots, scope), parse(spec))
    log = controller.replay(events, log=True).log
    return controller, [(layer, expert) for *_, layer, expert in log.tolist() if expert >= 0]


# Two requests: A used experts 0 and 1 of layer 0 and expert 2 of layer 1, B expert 2, 3 and 3.
A = [(0, 0, {0: 3}), (0, 0, {1: 1}), (0, 1, {2: 4})]
B = [(1, 0, {2: 2}), (1, 0, {3: 2}), (1, 1, {3: 4})]


@njit
def fill_shares(state, phase, out):
    for layer in range(out.shape[0]):
        for expert in range(out.shape[1]):
            out[layer, expert] = share(state, phase, layer, expert)


def shares(controller, phase=Phase.DECODE):
    out = np.zeros((controller.plan.shape.layers, controller.plan.shape.experts))
    fill_shares(controller.state, int(phase), out)
    return out.tolist()


def running_of(controller):
    """The matrices of the running requests by number."""
    state = controller.state
    return {int(state.request[run]): state.running[:, :, run].tolist() for run in np.flatnonzero(state.request >= 0)}


def stored_in(controller):
    """The decode rows of the stored requests."""
    return controller.state.rows[: controller.state.held[0], Phase.DECODE].tolist()


def test_the_nearest_request_is_the_prediction():
    # A third request begins with expert 0 of layer 0: cosine 3 / sqrt(10) with A, 0 with B. A's rows: 3/4, 1/4; 1.
    controller, _ = replayed("eam", requests_of(TWO_BY_FOUR, [*A, *B, (2, 0, {0: 1})]), 8)
    assert shares(controller) == [[0.75, 0.25, 0, 0], [0, 0, 1, 0]]
    assert controller.state.held[0] == 2


def test_only_the_layers_that_ran_count():
    # Layer 0 alone speaks for A: 3 / sqrt(10) = 0.95 against 0. Then layer 1 asks for expert 3 twice, and with all of
    # both rows A is at 3 / sqrt(26 * 5) = 0.26, B at 8 / sqrt(24 * 5) = 0.73.
    begun = [*A, *B, (2, 0, {0: 1}), (2, 1, {3: 2})]
    controller, _ = replayed("eam", requests_of(TWO_BY_FOUR, begun), 8)
    assert shares(controller) == [[0, 0, 0.5, 0.5], [0, 0, 0, 1]]


def test_the_nearest_are_added_up():
    # (3 + 0, 1 + 0, 0 + 2, 0 + 2) of 8 in layer 0, (0, 0, 4, 4) of 8 in layer 1.
    begun = [*A, *B, (2, 0, {0: 1, 2: 1})]
    controller, _ = replayed("eam:nearest=2", requests_of(TWO_BY_FOUR, begun), 8)
    assert shares(controller) == [[0.375, 0.125, 0.25, 0.25], [0, 0, 0.5, 0.5]]


def test_the_least_predicted_is_evicted():
    # All of layer 0 has two slots, which hold 2 and 3 after B. The third request is like A once it asks for 0; by A,
    # 2 and 3 are both worth nothing, and 2 is older. Expert 1 (1/4) then replaces 3, and 3 replaces 1, not 0 (3/4).
    rows = [*A, *B, (2, 0, {0: 1}), (2, 0, {1: 1}), (2, 0, {3: 1})]
    _, evicted = replayed("eam", requests_of(TWO_BY_FOUR, rows), 4)
    assert [key for key in evicted if key[0] == 0][-3:] == [(0, 2), (0, 3), (0, 1)]


def test_in_a_pool_deep_layers_are_evicted_first():
    # After A the pool of three holds (0, 0), (0, 1), (1, 2). B is like nothing yet, so its own counts decide: all three
    # are worth eps, halved in layer 1: (1, 2) is evicted although (0, 0) is older.
    _, evicted = replayed("eam", requests_of(TWO_BY_FOUR, [*A, *B[:1]]), 3, Scope.POOL)
    assert evicted == [(1, 2)]


def test_before_anything_is_stored_the_running_request_predicts():
    # Expert 0 was used by 3 of 4 tokens, expert 1 by 1: 1 is evicted for 2 although 0 is older.
    controller, evicted = replayed("eam", requests_of(TWO_BY_FOUR, [*A[:2], (0, 0, {2: 1})]), 4)
    assert evicted == [(0, 1)]
    assert controller.state.held[0] == 0


def test_the_most_similar_makes_way():
    # Full with A and B; a third request like B takes the place of B.
    rows = [*A, *B, (2, 0, {3: 2}), (2, 0, {3: 3}), (2, 1, {3: 1}), (3, 0, {0: 1})]
    controller, _ = replayed("eam:capacity=2", requests_of(TWO_BY_FOUR, rows), 8)
    assert controller.state.held[0] == 2
    assert controller.state.rows[:, Phase.DECODE].tolist() == [
        [[3, 1, 0, 0], [0, 0, 4, 0]],
        [[0, 0, 0, 5], [0, 0, 0, 1]],
    ]


def test_prompts_are_kept_apart_and_end_a_request():
    rows = [
        (0, {0: 2, 1: 1}, 2, Phase.PREFILL),
        (0, {1: 1}, 1, Phase.DECODE),
        (0, {2: 3}, 3, Phase.PREFILL),  # after a decode: another request of the same number
    ]
    controller, _ = replayed("eam", make_events(ModelShape(1, 4, 2), rows), 4)
    assert controller.state.held[0] == 1
    assert controller.state.rows[0].tolist() == [[[2, 1, 0, 0]], [[0, 1, 0, 0]]]
    assert running_of(controller) == {0: [[[0, 0, 3, 0]], [[0, 0, 0, 0]]]}


def one_pass(request, first, second):
    """One token: an expert of layer 0, then one of layer 1."""
    return [(request, 0, {first: 1}), (request, 1, {second: 1})]


# Two requests that take turns, two passes each, and what each is in the end.
TURNS = [*one_pass(0, 0, 2), *one_pass(1, 2, 3), *one_pass(0, 1, 2), *one_pass(1, 3, 3)]
FIRST, SECOND = [[1, 1, 0, 0], [0, 0, 2, 0]], [[0, 0, 1, 1], [0, 0, 0, 2]]


def test_requests_that_take_turns_are_stored_whole():
    controller, _ = replayed("eam", requests_of(TWO_BY_FOUR, TURNS), 8)
    assert stored_in(controller) == []
    assert {request: decode for request, (_, decode) in running_of(controller).items()} == {0: FIRST, 1: SECOND}
    # A third takes a turn, too, and then a second one in a row: no other is left.
    controller, _ = replayed("eam", requests_of(TWO_BY_FOUR, [*TURNS, *one_pass(2, 0, 0)]), 8)
    assert stored_in(controller) == []
    controller, _ = replayed("eam", requests_of(TWO_BY_FOUR, [*TURNS, *one_pass(2, 0, 0), (2, 0, {1: 1})]), 8)
    assert stored_in(controller) == [FIRST, SECOND]
    assert list(running_of(controller)) == [2]


def test_who_misses_a_round_is_over():
    # 0 is last seen in its second pass. Since then 1 begins a pass, 2 takes the turn of 0, and 1 begins another.
    rows = [*TURNS, *one_pass(2, 0, 0), (1, 0, {0: 1})]
    for number, stored in ((len(rows) - 1, []), (len(rows), [FIRST])):
        controller, _ = replayed("eam", requests_of(TWO_BY_FOUR, rows[:number]), 8)
        assert stored_in(controller) == stored


def test_each_request_is_matched_by_all_its_passes():
    # 2 is like A, 3 like B. What 2 asks for in layer 1 is in neither, and its layer 0 speaks for A still.
    turns = [(2, 0, {0: 1}), (3, 0, {2: 1}), (2, 1, {1: 1}), (3, 1, {1: 1})]
    like_a, like_b = [[0.75, 0.25, 0, 0], [0, 0, 1, 0]], [[0, 0, 0.5, 0.5], [0, 0, 0, 1]]
    for number, expected in enumerate([like_a, like_b, like_a, like_b], 1):
        controller, _ = replayed("eam", requests_of(TWO_BY_FOUR, [*A, *B, *turns[:number]]), 8)
        assert shares(controller) == expected


def test_what_is_stored_meanwhile_is_matched_by_all_that_the_others_have():
    # 0 is over when 1 begins its second pass without it. What 1 asks for then is nothing that 0 had, but its first pass
    # was, before 0 was stored.
    rows = [(0, 0, {0: 1}), (1, 0, {0: 1}), (2, 0, {3: 1}), (1, 0, {1: 1})]
    controller, _ = replayed("eam", requests_of(TWO_BY_FOUR, rows), 8)
    assert stored_in(controller) == [[[1, 0, 0, 0], [0, 0, 0, 0]]]
    assert shares(controller) == [[1, 0, 0, 0], [0, 0, 0, 0]]


def test_who_ran_alone_is_stored_at_once_and_goes_on_if_it_comes_back():
    alone = [*one_pass(0, 0, 2), *one_pass(0, 0, 2)]
    joined = [*alone, *one_pass(1, 0, 3)]
    controller, _ = replayed("eam", requests_of(TWO_BY_FOUR, joined), 8)
    assert stored_in(controller) == [[[2, 0, 0, 0], [0, 0, 2, 0]]]
    assert shares(controller) == [[1, 0, 0, 0], [0, 0, 1, 0]]
    # Its own past is no prediction: its running counts are, and they go on from where they were.
    controller, _ = replayed("eam", requests_of(TWO_BY_FOUR, [*joined, (0, 0, {1: 2})]), 8)
    assert shares(controller) == [[0.5, 0.5, 0, 0], [0, 0, 1, 0]]
    # In the end it is stored whole, where it was.
    ended = [*joined, (0, 0, {1: 2}), (0, 1, {2: 1}), *one_pass(1, 0, 3), *one_pass(2, 1, 1), *one_pass(2, 1, 1)]
    controller, _ = replayed("eam", requests_of(TWO_BY_FOUR, ended), 8)
    assert stored_in(controller) == [[[2, 2, 0, 0], [0, 0, 3, 0]], [[2, 0, 0, 0], [0, 0, 0, 2]]]


def test_who_has_lost_its_place_takes_another():
    # 0 runs alone and is stored in place 0 when 1 comes. Then both take turns, and with each prompt after a decode
    # another 1 is over. The first takes place 1. The second is like what 0 was when it was stored, and takes place 0.
    # When 0 is over, it is most like the first 1: 9 / sqrt(85) against 2 / sqrt(85).
    own, turn = (0, {0: 1}, Phase.DECODE, 0), (0, {1: 3}, Phase.DECODE, 0)
    others = [({1: 1}, Phase.DECODE), ({2: 1}, Phase.PREFILL), ({0: 9}, Phase.DECODE), ({3: 1}, Phase.PREFILL)]
    first, second, third, fourth = [(0, *other, 1) for other in others]
    rows = [own, own, first, turn, second, turn, third, turn, fourth, (0, {3: 1}, Phase.DECODE, 1)]
    events = make_events(ModelShape(1, 4, 1), [(layer, counts, 9, phase) for layer, counts, phase, _ in rows])
    events = replace(events, request=np.array([row[-1] for row in rows], np.int32))
    controller, _ = replayed("eam:capacity=2", events, 4)
    assert stored_in(controller) == [[[9, 0, 0, 0]], [[2, 9, 0, 0]]]


def test_requests_one_after_the_other_are_stored_when_the_next_begins():
    rng = np.random.default_rng(8)
    rows, sums = [], []
    for request in range(5):
        sums.append(np.zeros((2, 4)))
        for layer in [0, 1] * int(rng.integers(2, 5)):
            expert = int(rng.integers(4))
            rows.append((request, layer, {expert: 1}))
            sums[-1][layer, expert] += 1
    for number in range(1, len(rows) + 1):
        controller, _ = replayed("eam", requests_of(TWO_BY_FOUR, rows[:number]), 8)
        assert stored_in(controller) == [matrix.tolist() for matrix in sums[: rows[number - 1][0]]]


def test_more_streams_than_places_stay_bounded():
    from hotset.policies.eam import RUNNING

    shape = ModelShape(1, 32, 1)
    turns = [(request, 0, {request: 1}) for request in range(RUNNING + 4)]
    for number in (RUNNING, RUNNING + 1, RUNNING + 4):
        controller, _ = replayed("eam", requests_of(shape, turns[:number]), 32)
        # Those seen longest ago have made way, and no others.
        assert np.argmax(np.array(stored_in(controller)).reshape(-1, 32), axis=1).tolist() == [*range(number - RUNNING)]
        assert sorted(running_of(controller)) == [*range(number - RUNNING, number)]
    controller, _ = replayed("eam:capacity=3", requests_of(shape, turns * 3), 32)
    assert len(stored_in(controller)) == 3
    assert len(running_of(controller)) == RUNNING


def test_as_many_streams_as_places_are_stored_whole():
    from hotset.policies.eam import RUNNING

    shape = ModelShape(1, 32, 1)
    turns = [(request, 0, {request: 1}) for _ in range(3) for request in range(RUNNING)]
    controller, _ = replayed("eam", requests_of(shape, [*turns, (99, 0, {31: 1}), (99, 0, {31: 1})]), 32)
    assert np.array(stored_in(controller)).reshape(-1, 32).tolist() == (3 * np.eye(RUNNING, 32)).tolist()


def test_what_is_taught_takes_no_turns():
    controller = Controller(SlotPlan(TWO_BY_FOUR, 4), parse("eam"))
    controller.replay(requests_of(TWO_BY_FOUR, TURNS))
    controller.seed_from_rates(np.full((2, 4), 0.25), 64)
    assert stored_in(controller) == [FIRST, SECOND]
    controller.replay(requests_of(TWO_BY_FOUR, one_pass(2, 0, 0)))
    assert stored_in(controller) == [FIRST, SECOND]
    assert list(running_of(controller)) == [2]


@pytest.mark.parametrize("tokens", [1, 64])
def test_what_is_taught_serves_until_a_request_is_stored(tokens):
    controller = Controller(SlotPlan(TWO_BY_FOUR, 4), parse("eam"))
    controller.seed_from_rates(np.array([[0.9, 0.1, 0, 0], [0, 0, 0.5, 0.5]]), tokens)
    np.testing.assert_allclose(shares(controller), [[0.9, 0.1, 0, 0], [0, 0, 0.5, 0.5]])
    controller.replay(requests_of(TWO_BY_FOUR, [(0, 0, {1: 1})]))
    np.testing.assert_allclose(shares(controller)[1], [0, 0, 0.5, 0.5], rtol=1e-6)


@pytest.mark.parametrize("spec", ["eam", "eam:capacity=2", "eam:capacity=3,nearest=2"])
def test_random_requests_against_the_slow_model(spec):
    rng = np.random.default_rng(3)
    finished = []
    for _, scope in product(range(25), [Scope.LAYER, Scope.POOL]):
        shape = random_shape(rng)
        events = random_events(rng, shape, 80, prefill=rng.choice([0.0, 0.2]))
        events = replace(events, request=np.sort(rng.integers(0, 8, 80)).astype(np.int32))
        finished.append(Pair(spec, events, random_budget(rng, shape), scope).compare())
    assert np.mean(finished) > 0.9


@pytest.mark.parametrize("spec", ["eam", "eam:capacity=2", "eam:capacity=3,nearest=2"])
def test_random_turns_against_the_slow_model(spec):
    rng = np.random.default_rng(5)
    finished = []
    for streams, scope in product([1, 2, 3, 4, 4, 5, 8, 20], [Scope.LAYER, Scope.POOL]):
        shape = random_shape(rng, layers=3)
        pair = Pair(spec, random_turns(rng, shape, streams, 60 // streams + 1), random_budget(rng, shape), scope)
        finished.append(pair.compare())
        if finished[-1]:
            assert_same_requests(pair.fast, pair.slow.policy)
    assert np.mean(finished) > 0.8


def assert_same_requests(controller, slow):
    """The same matrices are stored in the same places, and the same requests run."""
    shape = controller.plan.shape

    def full(matrix):
        out = np.zeros((len(Phase), shape.layers, shape.experts))
        for phase, counts in matrix.items():
            for key, count in counts.items():
                out[phase, *key] = count
        return out.tolist()

    state = controller.state
    assert state.rows[: state.held[0]].tolist() == [full(past) for past in slow.past]
    assert running_of(controller) == {one.number: full(one.counts) for one in slow.running}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("eam:capacity=0", "capacity must be 1 to 4096 requests"),
        ("eam:nearest=9", "nearest must be 1 to 8 requests"),
        ("eam:eps=0", "eps must be more than 0"),
        ("eam:eps=nan", "eps must be more than 0"),
    ],
)
def test_wrong_options_are_refused(spec, message):
    with pytest.raises(PolicyError, match=message):
        parse(spec)


def predicted(forecast, events, target):
    """What a forecast says of a layer after all these events, and its state."""
    from hotset.forecasts._kernel import steps_of

    steps, state = steps_of(type(forecast)), forecast.start(events.shape)
    none, out = np.full((1, 1), -1, np.int16), np.zeros(events.shape.experts)
    for i, event in enumerate(events):
        own = slice(events.start[i], events.start[i + 1])
        phase, request = int(event.phase), int(events.request[i])
        args = (state, event.layer, events.expert[own], events.count[own], event.tokens, phase, request, -1, none)
        steps.observe(*args)
    steps.probabilities(*args, target, 1, out)
    return out, state


def test_the_forecast_is_the_row_of_the_nearest_request_as_probabilities():
    from hotset.forecasts.eam import SMOOTH, Eam

    out, state = predicted(Eam(), requests_of(TWO_BY_FOUR, [*A, *B, (2, 0, {0: 1})]), 1)
    # A's row of layer 1 is (0, 0, 4, 0) of 4 tokens; 4 tokens of the rate of use are mixed in.
    raw = (np.array([0, 0, 4, 0]) + SMOOTH * state.rates.rate[1]) / (4 + SMOOTH)
    odds = state.line[0] * np.log(raw / (1 - raw)) + state.line[1]
    np.testing.assert_allclose(out, 1 / (1 + np.exp(-odds)), rtol=1e-5)


def test_the_forecast_is_of_the_request_whose_turn_it_is():
    from hotset.forecasts.eam import Eam

    # 2 is like A and 3 like B; the second pass of 2 has nothing in common with either.
    rows = [*A, *B, (2, 0, {0: 1}), (3, 0, {2: 1}), (2, 1, {1: 1}), (3, 1, {1: 1})]
    likely = [int(np.argmax(predicted(Eam(), requests_of(TWO_BY_FOUR, rows[:end]), 0)[0])) for end in (-1, None)]
    assert likely[0] == 0
    assert likely[1] in (2, 3)


def test_the_forecast_is_calibrated_and_keeps_the_order():
    from hotset.forecasts.eam import Eam

    rng = np.random.default_rng(4)
    shape = ModelShape(2, 16, 2)
    tastes = rng.dirichlet(np.full(16, 0.3), (3, 2)) * 0.97 + 0.03 / 16
    rows = []
    for request in range(60):
        for step in range(20):
            layer = step % 2
            rows.append(
                (request, layer, dict.fromkeys(rng.choice(16, 2, False, tastes[request % 3, layer]).tolist(), 1))
            )
    out, state = predicted(Eam(capacity=20), requests_of(shape, rows), 0)
    assert state.requests.held[0] == 20
    assert 1.6 < out.sum() < 2.4
    assert state.line[0] > 0
    assert set(np.argsort(-out)[:2].tolist()) & set(np.argsort(-tastes[59 % 3, 0])[:2].tolist())
