"""What each request used and cost, however they take turns: it always adds up to what the engine did."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from hotset import ModelShape, Phase, policies
from hotset.cache.controller import Controller
from hotset.cache.counters import Count
from hotset.cache.plan import SlotPlan
from hotset.cache.usage import USES
from hotset.engine.requests import KEPT, RequestLog
from hotset.engine.step import NO_REQUEST

LAYERS, EXPERTS = 3, 8


def make() -> tuple[Controller, RequestLog]:
    controller = Controller(SlotPlan(ModelShape(LAYERS, EXPERTS, 2), 12), policies.parse("lru"))
    return controller, RequestLog(controller)


EVENT = st.tuples(
    st.sampled_from([0, 1, 2, NO_REQUEST]),
    st.integers(0, LAYERS - 1),
    st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=4, unique=True).map(sorted),
    st.integers(1, 5),
    st.sampled_from(list(Phase)),
    st.booleans(),  # whether somebody looks after it
)


@settings(max_examples=60, deadline=None)
@given(events=st.lists(EVENT, max_size=40))
def test_every_event_is_credited_to_its_request(
    events: list[tuple[int, int, list[int], int, Phase, bool]],
) -> None:
    controller, log = make()
    uses = np.zeros((4, len(Phase), LAYERS, EXPERTS), int)
    counts, loaded, total = np.zeros((4, 3), int), [0, 0, 0, 0], 0
    for request, layer, experts, tokens, phase, look in events:
        log.serve(request, layer, total)
        missing = controller.route(
            layer, np.array(experts, np.int32), np.full(len(experts), tokens, np.int32), tokens, phase, request
        )
        place = 3 if request == NO_REQUEST else request
        uses[place, phase, layer, experts] += tokens
        counts[place] += 1, len(experts) - missing, missing
        loaded[place] += 100 * missing
        total += 100 * missing
        if look:
            log.all(total)
    found = log.all(total)
    assert [each.number for each in found] == sorted({event[0] for event in events} - {NO_REQUEST})
    for each in found:
        assert np.array_equal(each.uses, uses[each.number])
        assert [each.counters.total(count) for count in (Count.EVENTS, Count.HITS, Count.MISSES)] == counts[
            each.number
        ].tolist()
        assert each.loaded_bytes == loaded[each.number]
    assert np.array_equal(controller.usage.counts[USES], uses.sum(axis=0))


def test_who_had_a_turn_longest_ago_is_forgotten_first() -> None:
    controller, log = make()
    for request in range(KEPT + 10):
        for served in (0, request):  # the first goes on all the time
            log.serve(served, 0, 0)
            controller.route(0, np.array([1], np.int32))
    found = [each.number for each in log.all(0)]
    assert found == [0, *range(11, KEPT + 10)]
    assert len(found) == KEPT
    assert log.all(0)[0].tokens[Phase.DECODE] == KEPT + 11
