"""Matrices of requests: found by cosine over what is known, bounded and diverse, and sound in a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from profile_samples import SHAPE, full_profile
from test_hostile_profiles import attempt, bytes_of, file_of, parts, refused

from hotset.cache import Controller, SlotPlan
from hotset.errors import ProfileError
from hotset.policies import parse
from hotset.policies.eam import add_row, empty_state, match, share
from hotset.profile import Profile
from hotset.profile.combine import merge
from hotset.profile.fold import fold
from hotset.profile.matrices import Matrices, collected, recall, store, union
from hotset.shape import ModelShape
from hotset.trace import Phase

GRID = (2, SHAPE.layers, SHAPE.experts)


def some(number: int, seed: int = 0) -> Matrices:
    """Requests that use about half of all experts."""
    return Matrices.of(np.random.default_rng(seed).poisson(0.7, (number, *GRID)))


def full(matrices: Matrices) -> np.ndarray[Any, Any]:
    return np.array(list(matrices.each(SHAPE.experts))).reshape(-1, *GRID)


def plain_cosine(stored: Any, running: Any) -> float:
    """Over the layers that the running request has, by the book."""
    rows = running.any(axis=-1)
    a, b = stored[rows].astype(float).ravel(), running[rows].astype(float).ravel()
    size = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / size) if size else 0.0


@njit
def look(state: Any, phase: int, out: Any) -> None:
    match(state, phase)
    for layer in range(out.shape[0]):
        for expert in range(out.shape[1]):
            out[layer, expert] = share(state, phase, layer, expert)


def matched(stored: Matrices, running: Any, nearest: int = 1) -> tuple[list[int], Any]:
    """The stored requests most like a running one, and what they predict."""
    state = empty_state(SHAPE, 50, nearest, 0.0)
    recall(state, stored)
    for phase, layer in np.argwhere(running.any(axis=-1)).tolist():
        experts = np.flatnonzero(running[phase, layer])
        add_row(state, phase, layer, experts, running[phase, layer, experts].astype(np.float64))
    out = np.zeros((SHAPE.layers, SHAPE.experts))
    look(state, int(Phase.DECODE), out)
    assert np.array_equal(full(Matrices.of(state.rows[: state.held[0]])), full(stored))  # looking stores nothing
    return state.matched[1 : 1 + state.matched[0]].tolist(), out


@pytest.mark.parametrize("layers_run", [1, 2, 3])
def test_matches_are_those_of_plain_cosines(layers_run: int) -> None:
    stored, running = full(some(40)), full(some(1, seed=1))[0]
    running[Phase.DECODE, layers_run:] = 0
    cosines = [plain_cosine(matrix[Phase.DECODE], running[Phase.DECODE]) for matrix in stored]
    best = np.argsort(-np.array(cosines), kind="stable")[:5]
    found, predicted = matched(some(40), running, 5)
    assert found == best.tolist()
    summed = stored[best, Phase.DECODE].sum(axis=0)
    np.testing.assert_allclose(predicted, summed / summed.sum(axis=-1, keepdims=True))


def test_nothing_in_common_is_no_match_and_predicts_itself() -> None:
    stored, running = np.zeros((1, *GRID)), np.zeros(GRID)
    stored[0, Phase.DECODE, 0, 1], running[Phase.DECODE, 0, 2] = 5, 3
    found, predicted = matched(Matrices.of(stored), running)
    assert found == []
    assert predicted[0].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]


def test_a_full_collection_stays_diverse() -> None:
    kinds = np.random.default_rng(2).poisson(3.0, (3, *GRID))
    noise = np.random.default_rng(3).poisson(0.1, (60, *GRID))
    state = empty_state(SHAPE, 3, 1, 0.0)
    for i in range(60):
        store(state, kinds[i % 3 if i < 9 else 0] + noise[i])
    kept = full(collected(state))
    near = [[plain_cosine(one, kind) for kind in kinds] for one in kept]
    assert sorted(np.argmax(near, axis=1).tolist()) == [0, 1, 2]


def test_a_policy_gives_and_takes_its_requests() -> None:
    state = parse("eam:capacity=20").start(SHAPE)
    recall(state, some(12))
    assert np.array_equal(full(collected(state)), full(some(12)))
    small = parse("eam:capacity=5").start(SHAPE)
    recall(small, some(12))
    assert len(collected(small)) == 5


def test_the_running_request_is_collected_and_left_running() -> None:
    state = parse("eam").start(SHAPE)
    add_row(state, 1, 2, np.array([3]), np.array([4.0]))
    for _ in range(2):
        assert full(collected(state))[0, 1, 2].tolist() == [0, 0, 0, 4, 0, 0, 0, 0]
    assert state.held[0] == 0


def test_all_running_requests_are_collected_and_go_on() -> None:
    cache = Controller(SlotPlan(SHAPE, SHAPE.total_experts), parse("eam"))
    for turn, request in enumerate((7, 8, 9, 7, 8, 9)):
        for layer in range(SHAPE.layers):
            cache.route(layer, np.array([request - 5, 6], np.int32), request=request)
        assert cache.state.held[0] == 0, turn
    used = full(collected(cache.state))[:, Phase.DECODE]
    assert used[:, 0].tolist() == [[0, 0, 2, 0, 0, 0, 2, 0], [0, 0, 0, 2, 0, 0, 2, 0], [0, 0, 0, 0, 2, 0, 2, 0]]
    assert np.array_equal(used, np.repeat(used[:, :1], SHAPE.layers, axis=1))
    assert np.array_equal(full(collected(cache.state))[:, Phase.DECODE], used)


def test_a_very_large_model_keeps_fewer() -> None:
    state = parse("eam").start(ModelShape(32, 32767, 8))
    assert state.rows.shape[0] == 32
    assert state.running.nbytes <= 64 << 20


def test_union_keeps_all_that_differ_and_no_more_than_fit() -> None:
    both = union(SHAPE, [some(5), None, some(7, seed=1), some(5)])
    assert both is not None
    assert np.array_equal(full(both), np.concatenate([full(some(5)), full(some(7, seed=1))]))
    bounded = [union(SHAPE, [some(5), some(7, seed=1)], capacity=6) for _ in range(2)]
    assert [len(found) for found in bounded if found] == [6, 6]
    assert bounded[0] is not None
    assert bounded[1] is not None
    assert np.array_equal(full(bounded[0]), full(bounded[1]))
    assert union(SHAPE, [None, None]) is None


def test_profiles_merge_and_fold_their_matrices() -> None:
    one, two, none = full_profile(1, matrices=some(3)), full_profile(2, matrices=some(4, seed=1)), full_profile(3)
    for profiles, number in (([one, two], 7), ([one, one], 3), ([one, none], 3)):
        merged = merge(profiles).matrices
        assert merged is not None
        assert len(merged) == number
    assert merge([none, none]).matrices is None
    assert fold(one, two).matrices is two.matrices
    assert fold(one, none).matrices is one.matrices


@given(number=st.integers(0, 6), seed=st.integers(0, 999))
@settings(max_examples=20, deadline=None)
def test_files_are_stable(number: int, seed: int) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        first, second = Path(folder) / "a.safetensors", Path(folder) / "b.safetensors"
        full_profile(matrices=some(number, seed)).save(first)
        found = Profile.load(first)
        found.save(second)
        assert first.read_bytes() == second.read_bytes()
        assert found.matrices is not None
        assert np.array_equal(full(found.matrices), full(some(number, seed)))


SAMPLE = full_profile(matrices=some(3))


def unsound(**changes: Any) -> Matrices:
    return replace(some(3), **changes)


def first_row_of_two() -> int:
    """The place of an expert that has a neighbour in its row."""
    return int(np.cumsum(some(3).sizes.ravel())[int(np.argmax(some(3).sizes.ravel() > 1))]) - 1


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        (unsound(sizes=some(3).sizes[:, :, :2]), "not of 3 layers"),
        (unsound(sizes=some(3).sizes[:2]), "as many entries"),
        (unsound(expert=some(3).expert[:-1]), "as many entries"),
        (unsound(expert=some(3).expert + 1), "less than 8"),
        (
            unsound(expert=np.where(np.arange(len(some(3).expert)) == first_row_of_two(), 0, some(3).expert)),
            "must rise",
        ),
        (unsound(count=some(3).count * 0), "not positive"),
        (unsound(count=some(3).count * -1), "not positive"),
        (unsound(count=some(3).count * np.float32("nan")), "no number"),
        (unsound(count=some(3).count * np.float32("inf")), "far too large"),
        (Matrices.of(np.zeros((4097, *GRID))), "more than any collection"),
    ],
)
def test_unsound_matrices_are_refused(matrices: Matrices, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        full_profile(matrices=matrices)


def test_a_small_file_cannot_become_a_large_collection() -> None:
    shape = ModelShape(32, 32767, 8)
    sizes = np.zeros((33, 2, 32), np.uint16)
    with pytest.raises(ProfileError, match="more than any collection"):
        Matrices(sizes, np.zeros(0, np.uint16), np.zeros(0, np.float32)).check(shape)


def test_each_tensor_must_be_there_in_its_type() -> None:
    tensors, header, content = parts(bytes_of(SAMPLE))
    assert attempt(file_of(tensors, header, content)) is None
    for name in ("matrices.sizes", "matrices.expert", "matrices.count"):
        for dtype, sides in (("F16", tensors[name]["shape"]), (tensors[name]["dtype"], [1, *tensors[name]["shape"]])):
            odd = tensors[name] | {"dtype": dtype, "shape": sides}
            refused(file_of(tensors | {name: odd}, header, content), "")
    alone = {"dtype": "F32", "shape": [0], "data_offsets": [len(parts()[2])] * 2}
    refused(file_of(parts()[0] | {"matrices.count": alone}, header, parts()[2]), "lacks the tensor 'matrices.sizes'")


@settings(max_examples=150, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 7)), min_size=1, max_size=4))
def test_flipped_bits(flips: list[tuple[int, int]]) -> None:
    data = bytearray(bytes_of(SAMPLE))
    for place, bit in flips:
        data[place % len(data)] ^= 1 << bit
    attempt(bytes(data))
