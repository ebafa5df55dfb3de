"""Activation-aware caching on sequences short enough to follow with a pencil, and against the slow model."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from event_samples import make_events, random_budget, random_events, random_shape
from test_against_slow_model import Pair

from hotset.cache import Controller, Scope, SlotPlan
from hotset.errors import PolicyError
from hotset.policies import parse
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


def shares(controller, phase=Phase.DECODE):
    from hotset.policies.eam import fill_shares

    out = np.zeros((controller.plan.shape.layers, controller.plan.shape.experts))
    fill_shares(controller.state, int(phase), out)
    return out.tolist()


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


def test_the_least_predicted_leaves():
    # All of layer 0 has two slots, which hold 2 and 3 after B. The third request is like A once it asks for 0; by A,
    # 2 and 3 are both worth nothing, and 2 is older. Expert 1 (1/4) then replaces 3, and 3 replaces 1, not 0 (3/4).
    rows = [*A, *B, (2, 0, {0: 1}), (2, 0, {1: 1}), (2, 0, {3: 1})]
    _, left = replayed("eam", requests_of(TWO_BY_FOUR, rows), 4)
    assert [key for key in left if key[0] == 0][-3:] == [(0, 2), (0, 3), (0, 1)]


def test_in_a_pool_deep_layers_leave_first():
    # After A the pool of three holds (0, 0), (0, 1), (1, 2). B is like nothing yet, so its own counts decide: all three
    # are worth eps, halved in layer 1: (1, 2) leaves although (0, 0) is older.
    _, left = replayed("eam", requests_of(TWO_BY_FOUR, [*A, *B[:1]]), 3, Scope.POOL)
    assert left == [(1, 2)]


def test_before_anything_is_stored_the_running_request_predicts():
    # Expert 0 was used by 3 of 4 tokens, expert 1 by 1: 1 leaves for 2 although 0 is older.
    controller, left = replayed("eam", requests_of(TWO_BY_FOUR, [*A[:2], (0, 0, {2: 1})]), 4)
    assert left == [(0, 1)]
    assert controller.state.held[0] == 0


def test_the_most_similar_makes_way():
    # Full with A and B; a third request like B takes the place of B.
    rows = [*A, *B, (2, 0, {3: 5}), (2, 1, {3: 1}), (3, 0, {0: 1})]
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
    assert controller.state.running.tolist() == [[[0, 0, 3, 0]], [[0, 0, 0, 0]]]


def test_what_is_taught_serves_until_a_request_is_stored():
    controller = Controller(SlotPlan(TWO_BY_FOUR, 4), parse("eam"))
    controller.teach(np.array([[0.9, 0.1, 0, 0], [0, 0, 0.5, 0.5]]), 64)
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


def foreseen(forecast, events, target):
    """What a forecast says of a layer after all these events, and its state."""
    from hotset.forecasts._kernel import steps_of

    steps, state = steps_of(type(forecast)), forecast.start(events.shape)
    nobody, out = np.full((1, 1), -1, np.int16), np.zeros(events.shape.experts)
    for i, event in enumerate(events):
        own = slice(events.start[i], events.start[i + 1])
        phase, request = int(event.phase), int(events.request[i])
        args = (state, event.layer, events.expert[own], events.count[own], event.tokens, phase, request, -1, nobody)
        steps.observe(*args)
    steps.chances(*args, target, 1, out)
    return out, state


def test_the_forecast_is_the_row_of_the_nearest_request_as_chances():
    from hotset.forecasts.eam import SMOOTH, Eam

    out, state = foreseen(Eam(), requests_of(TWO_BY_FOUR, [*A, *B, (2, 0, {0: 1})]), 1)
    # A's row of layer 1 is (0, 0, 4, 0) of 4 tokens; 4 tokens of the rate of use are mixed in.
    raw = (np.array([0, 0, 4, 0]) + SMOOTH * state.rates.rate[1]) / (4 + SMOOTH)
    odds = state.line[0] * np.log(raw / (1 - raw)) + state.line[1]
    np.testing.assert_allclose(out, 1 / (1 + np.exp(-odds)), rtol=1e-5)


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
    out, state = foreseen(Eam(capacity=20), requests_of(shape, rows), 0)
    assert state.requests.held[0] == 20
    assert 1.6 < out.sum() < 2.4
    assert state.line[0] > 0
    assert set(np.argsort(-out)[:2].tolist()) & set(np.argsort(-tastes[59 % 3, 0])[:2].tolist())
