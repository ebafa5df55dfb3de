"""Specialisation: distances and lifts by hand, by slow loops, and against chance."""

from __future__ import annotations

import math

import numpy as np
import pytest
from routed_samples import by_hand, drawn, uses, without

from hotset.analysis.labels import (
    MAX_VALUES,
    OTHERS,
    corrected_divergence,
    jensen_shannon,
    keys_to_study,
    lift_of,
    study_label,
    study_labels,
)
from hotset.shape import ModelShape
from hotset.trace import Phase, Trace


def slow_divergence(p: list[float], q: list[float]) -> float:
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]

    def relative(of: list[float]) -> float:
        return sum(a * math.log2(a / m) for a, m in zip(of, middle, strict=True) if a > 0)

    return (relative(p) + relative(q)) / 2


def test_divergence_by_hand() -> None:
    same = jensen_shannon(np.array([0.5, 0.5]), np.array([0.5, 0.5]))
    apart = jensen_shannon(np.array([1.0, 0.0]), np.array([0.0, 1.0]))
    half = jensen_shannon(np.array([1.0, 0.0]), np.array([0.5, 0.5]))
    assert (float(same), float(apart)) == (0.0, 1.0)
    # m = (3/4, 1/4): (log2(4/3) + (log2(2/3) + log2(2)) / 2) / 2
    assert float(half) == pytest.approx((math.log2(4 / 3) + (math.log2(2 / 3) + 1) / 2) / 2)


def test_the_correction_takes_chance_away() -> None:
    """Two samples of one distribution have no distance on average; uncorrected they would have 0.022 bits."""
    random = np.random.default_rng(0)
    share = random.dirichlet(np.full(32, 5.0))
    plain, corrected = [], []
    for _ in range(300):
        uses = np.stack([random.multinomial(400, share), random.multinomial(700, share)])[:, None]
        corrected.append(corrected_divergence(uses)[0, 1, 0])
        plain.append(float(jensen_shannon(uses[0, 0] / 400, uses[1, 0] / 700)))
    bias = 31 / (8 * math.log(2)) * (1 / 400 + 1 / 700)
    assert np.mean(plain) == pytest.approx(bias, rel=0.06)
    assert abs(np.mean(corrected)) < 0.06 * bias


@pytest.mark.parametrize("seed", range(3))
def test_as_slowly(seed: int) -> None:
    trace = drawn(seed)
    study = study_label(trace, "topic")
    assert study is not None
    assert study.values == ("a", "b")
    layers, experts = trace.shape.layers, trace.shape.experts
    counted = np.zeros((2, layers, experts), int)
    for token, layer, expert in uses(trace):
        counted["ab".index(trace.labels[int(trace.request[token])]["topic"]), layer, expert] += 1
    assert (study.uses == counted).all()
    assert study.tokens.sum() == trace.tokens
    parts = []
    for layer in range(layers):
        sizes = counted[:, layer].sum(axis=1).tolist()
        p, q = ((counted[i, layer] / sizes[i]).tolist() for i in (0, 1))
        parts.append(slow_divergence(p, q) - (experts - 1) / (8 * math.log(2)) * (1 / sizes[0] + 1 / sizes[1]))
        for expert in range(experts):
            total = int(counted[:, layer, expert].sum())
            expected = counted[0, layer, expert] / total / (sizes[0] / sum(sizes)) if total else math.nan
            assert study.lift[0, layer, expert] == pytest.approx(expected, nan_ok=True)
    assert study.distance[0, 1] == pytest.approx(math.sqrt(max(sum(parts) / layers, 0)))
    assert study.distance[0, 0] == 0


def test_lift_by_hand() -> None:
    lift = lift_of(np.array([[[3, 1]], [[1, 3]]]))
    assert lift.tolist() == [[[1.5, 0.5]], [[0.5, 1.5]]]


def one_layer(labels: list[str], seed: int, own: bool) -> Trace:
    """Requests of 40 tokens; with `own` each value of the label prefers experts of its own."""
    random = np.random.default_rng(seed)
    rows, request = [], []
    for number, label in enumerate(labels):
        liked = np.zeros(16)
        if own:
            liked[4 * "abcd".index(label) : 4 * "abcd".index(label) + 4] = 3
        liked += random.normal(size=16)  # every request has a taste of its own
        for _ in range(40):
            rows.append(np.argsort(-(liked + random.gumbel(size=16)))[:2])
            request.append(number)
    return Trace(
        shape=ModelShape(1, 16, 2),
        experts=np.array(rows, np.int16)[:, None],
        request=np.array(request, np.int32),
        step=np.arange(len(rows), dtype=np.int32),
        phase=np.full(len(rows), Phase.DECODE, np.uint8),
        labels=tuple({"kind": label} for label in labels),
    )


def test_chance_is_that_of_labels_dealt_to_requests() -> None:
    """Where labels mean nothing, requests differ all the same: only dealt labels say how much that is."""
    empty = study_label(one_layer(list("abcd") * 6, 1, own=False), "kind")
    real = study_label(one_layer(list("abcd") * 6, 1, own=True), "kind")
    assert empty is not None
    assert real is not None
    assert empty.chance is not None
    assert real.chance is not None
    pairs = np.triu_indices(4, 1)
    assert empty.divergence[pairs].mean() < 1.6 * empty.chance.divergence.mean()
    assert real.divergence[pairs].mean() > 2 * real.chance.divergence.max()
    assert real.chance.largest_lift.shape == (20, 4)
    best = real.strongest(1)[0]
    assert best["lift"] > best["largest_by_chance"] == real.chance.largest_lift.max(axis=0)["abcd".index(best["value"])]
    assert real.above_chance()[0] > 10 > empty.above_chance()[0]
    assert real.chance.of_pairs.shape == (4, 4)
    assert real.specialised()[0] == 16


def test_strongest_needs_uses() -> None:
    trace = by_hand([[[0]]] * 30 + [[[1]]] * 30 + [[[2]]], 4, [0] * 30 + [1] * 31, labels=({"k": "x"}, {"k": "y"}))
    study = study_label(trace, "k")
    assert study is not None
    rows = study.strongest(9)
    assert [(row["expert"], row["value"]) for row in rows] == [(0, "x"), (1, "y")]  # expert 2 has one use
    assert rows[0]["lift"] == pytest.approx(61 / 30)
    assert study.chance is None  # one request per value: nothing to deal


def test_labels_that_some_requests_lack() -> None:
    trace = without(drawn(), labels=({"k": "x"}, {}, {"k": "y"}, {}, {"k": "x"}, {}))
    study = study_label(trace, "k")
    assert study is not None
    assert study.requests.tolist() == [2, 1]
    assert study.tokens.tolist() == [
        int(np.isin(trace.request, [0, 4]).sum()),
        int((trace.request == 2).sum()),
    ]


def test_no_label_and_one_value() -> None:
    assert study_label(without(drawn(), labels=()), "topic") is None
    assert study_label(without(drawn(), labels=({"k": "x"},) * 6), "k") is None


def test_many_values_become_few() -> None:
    number = MAX_VALUES + 10
    trace = by_hand([[[0]]] * number, 2, list(range(number)), labels=tuple({"k": str(i)} for i in range(number)))
    study = study_label(trace, "k")
    assert study is not None
    assert len(study.values) == MAX_VALUES
    assert study.values[-1] == OTHERS
    assert study.requests.sum() == number


def test_which_labels_are_studied() -> None:
    trace = drawn()
    assert keys_to_study(trace) == ["topic"]  # not one with a value for each request
    twice = tuple({**label, "again": label["topic"] + "!"} for label in trace.labels)
    assert keys_to_study(without(trace, labels=twice)) == ["topic"]  # nor one that tells the same apart
    several = tuple({"trace": str(i // 3), **label} for i, label in enumerate(trace.labels))
    assert keys_to_study(without(trace, labels=several)) == ["topic", "trace"]
    assert keys_to_study(without(trace, labels=())) == []


def test_the_label_that_tells_most_comes_first() -> None:
    """Not the one with most values: what it tells is less than labels dealt at random would."""
    kinds = list("abcd") * 6
    trace = one_layer(kinds, 1, own=True)
    labels = tuple({"kind": kind, "session": str(i // 2), "trace": str(i // 12)} for i, kind in enumerate(kinds))
    trace = without(trace, labels=labels)
    keys = keys_to_study(trace)
    assert keys == ["session", "kind", "trace"]
    kind, *others = study_labels(trace, keys)
    assert kind.key == "kind"
    assert kind.above_chance_by > max(other.above_chance_by for other in others)
    assert [study.key for study in study_labels(trace, keys, most=1)] == ["kind"]
    alone = study_label(without(trace, labels=tuple({"number": str(i)} for i in range(24))), "number")
    assert alone is not None
    assert alone.above_chance_by == -math.inf  # a value for each request: nothing to deal
