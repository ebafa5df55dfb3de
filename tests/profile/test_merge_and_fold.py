"""Merging is associative, files are stable, and folding fades what is old without end or loss of order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_samples import SHAPE, full_profile

from hotset.errors import ProfileError
from hotset.profile import Fingerprint, Profile
from hotset.profile.combine import compare, merge
from hotset.profile.export import to_csv
from hotset.profile.fold import HALF_LIFE_TOKENS, fold, profile_of
from hotset.profile.statistics import MAX_SPANS, History, Mark
from hotset.trace import Phase
from hotset.trace.synth import SynthConfig, synthesise

MARK = Fingerprint("Qwen3MoeForCausalLM", "abc")
MAX_MASS = 1 / (1 - 0.5 ** (1 / HALF_LIFE_TOKENS))
SEEDS = st.lists(st.integers(0, 10_000), min_size=3, max_size=3)
WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=3)


@given(SEEDS, WEIGHTS)
@settings(deadline=None)
def test_merging_is_associative_with_weights_and_learning(seeds: list[int], weights: list[float]) -> None:
    a, b, c = (full_profile(seed) for seed in seeds)
    whole = merge([a, b, c], weights)
    left = merge([merge([a, b], weights[:2]), c], [1, weights[2]])
    right = merge([a, merge([b, c], weights[1:])], [weights[0], 1])
    for other in (left, right):
        assert np.allclose(whole.uses, other.uses, rtol=1e-9)
        assert (whole.created, whole.updated, whole.policy) == (other.created, other.updated, "blend")
        assert (whole.tokens == other.tokens).all()
        assert (whole.hits == other.hits).all()
        assert whole.learnt.keys() == other.learnt.keys()
        for name, array in whole.learnt.items():
            assert other.learnt[name].dtype == array.dtype
            assert np.allclose(array, other.learnt[name], rtol=1e-5 if array.dtype == np.float32 else 1e-9)


def test_sums_add_up_and_means_lie_between() -> None:
    a, b = full_profile(1), full_profile(2)
    merged = merge([a, b], [2, 1])
    assert np.allclose(merged.learnt["sum.seen"], 2 * a.learnt["sum.seen"] + b.learnt["sum.seen"])
    rates = [profile.learnt["mean.rates"] for profile in (a, b)]
    assert (np.minimum(*rates) - 1e-12 <= merged.learnt["mean.rates"]).all()
    assert (merged.learnt["mean.rates"] <= np.maximum(*rates) + 1e-12).all()


def test_learning_of_different_policies_is_dropped() -> None:
    assert merge([full_profile(1), full_profile(2, policy="lfu")]).learnt == {}
    assert merge([full_profile(1), full_profile(2, learnt={})]).learnt == {}


def test_whole_numbers_round_and_infinities_survive() -> None:
    near, far = np.array([1, 127], np.int8), np.array([2, 127], np.int8)
    never = np.array([-np.inf, 3.0])
    parts = [full_profile(1, learnt={"sum.n": near, "x": never}), full_profile(1, learnt={"sum.n": far, "x": never})]
    learnt = merge(parts).learnt
    assert learnt["sum.n"].tolist() == [3, 127]
    assert learnt["x"].tolist() == [-np.inf, 3.0]


def test_infinities_that_cancel_drop_the_learning() -> None:
    parts = [full_profile(1, learnt={"x": np.array([end])}) for end in (np.inf, -np.inf)]
    assert merge(parts).learnt == {}


@pytest.mark.parametrize("weights", [[1], [1, -1], [1, float("inf")], [1, float("nan")], [0, 1], [1e9, 1]])
def test_bad_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ProfileError, match="--weights 2,1"):
        merge([full_profile(1), full_profile(2)], weights)


def test_foreign_weights_merge_if_asked() -> None:
    parts = [full_profile(1), full_profile(2, fingerprint=Fingerprint("Qwen3MoeForCausalLM", "xyz"))]
    with pytest.raises(ProfileError, match="--allow-foreign"):
        merge(parts)
    assert merge(parts, allow_foreign=True).fingerprint == MARK


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_files_are_stable(seed: int) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        first, second = Path(folder) / "a.safetensors", Path(folder) / "b.safetensors"
        full_profile(seed).save(first)
        Profile.load(first).save(second)
        assert first.read_bytes() == second.read_bytes()


def test_every_part_comes_back(tmp_path: Path) -> None:
    profile = full_profile(4)
    profile.save(tmp_path / "p.safetensors")
    found = Profile.load(tmp_path / "p.safetensors")
    for name in ("uses", "tokens", "hits", "misses", "residency"):
        assert np.array_equal(getattr(found, name), getattr(profile, name))
    assert np.array_equal(found.history.spans, profile.history.spans)
    assert found.history.marks == profile.history.marks


def test_marks_are_written_in_order_and_short(tmp_path: Path) -> None:
    history = History(np.ones((1, 3), np.int64), (Mark(9, "late"), Mark(2, "x" * 5000)))
    full_profile(history=history).save(tmp_path / "p.safetensors")
    marks = Profile.load(tmp_path / "p.safetensors").history.marks
    assert [mark.tokens for mark in marks] == [2, 9]
    assert len(marks[0].label) == 200


def counted(tokens: tuple[int, int], seed: int = 0) -> Profile:
    """Plain counts: every token uses two experts of every layer."""
    uses = np.random.default_rng(seed).random((2, 3, 8))
    uses *= 2 * np.array(tokens)[:, None, None] / uses.sum(axis=2, keepdims=True)
    return full_profile(seed, uses=uses, tokens=np.array(tokens))


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), min_size=1, max_size=6))
@settings(deadline=None)
def test_the_mass_is_bounded(runs: list[tuple[int, int]]) -> None:
    profile = None
    for seed, tokens in enumerate(runs):
        profile = fold(profile, counted(tokens, seed))
    assert profile is not None
    assert (profile.uses.sum(axis=2) <= 2 * MAX_MASS * (1 + 1e-9)).all()
    assert (profile.tokens == np.sum(runs, axis=0)).all()


def test_what_is_old_fades_by_its_own_phase() -> None:
    old, prompts = fold(None, counted((100, 100))), counted((HALF_LIFE_TOKENS, 0))
    folded = fold(old, replace(prompts, uses=np.zeros_like(prompts.uses)))
    assert np.allclose(folded.uses[Phase.PREFILL], old.uses[Phase.PREFILL] / 2)
    assert np.allclose(folded.uses[Phase.DECODE], old.uses[Phase.DECODE])


def test_the_phases_of_a_trace_keep_their_place() -> None:
    trace = synthesise(SynthConfig(layers=2, experts=8, top_k=2, requests=3, prompt_tokens=5, new_tokens=7))
    profile = profile_of(trace, MARK)
    assert profile.tokens.tolist() == [trace.count(Phase.PREFILL), trace.count(Phase.DECODE)]
    assert np.allclose(profile.uses.sum(axis=2), 2 * profile.tokens[:, None], rtol=0.01)
    assert profile.hits is None


def test_the_history_is_cut_and_its_marks_move() -> None:
    long = History(np.tile([10, 6, 4], (MAX_SPANS, 1)), (Mark(0, "begin"), Mark(10 * MAX_SPANS - 5, "late")))
    more = History(np.tile([10, 5, 5], (3, 1)), (Mark(0, "again"),))
    joined = fold(full_profile(1, history=long), full_profile(2, history=more)).history
    assert joined.spans.shape == (MAX_SPANS, 3)
    assert joined.spans[-3:, 1].tolist() == [5, 5, 5]
    assert joined.marks == (Mark(10 * MAX_SPANS - 35, "late"), Mark(10 * MAX_SPANS - 30, "again"))


def test_profiles_are_compared_by_layer_hot_set_and_expert() -> None:
    uses = np.zeros((2, 3, 8))
    uses[1, :2, :4] = [4, 3, 2, 1]
    moved = uses.copy()
    moved[1, 1] = moved[1, 1, ::-1]
    found = compare(full_profile(uses=uses), full_profile(uses=moved), top=1)
    assert found["cosine"]["layers"] == [pytest.approx(1), 0, None]
    assert found["cosine"]["least_alike_layers"][0] == 1
    assert found["changed"][0] | {"direction": "?"} == {
        "layer": 1, "expert": 0, "before": 0.8, "after": 0, "change": -0.8, "direction": "?",
    }  # fmt: skip
    assert found["changed"][0]["direction"] == "cooler"
    assert compare(full_profile(1), full_profile(1))["changed"] == []


def test_csv_has_a_line_per_expert_and_leaves_the_unknown_empty() -> None:
    lines = to_csv(full_profile()).splitlines()
    assert len(lines) == 1 + SHAPE.total_experts
    assert len(lines[1].split(",")) == 9
    assert to_csv(full_profile(hits=None, misses=None, residency=None)).splitlines()[1].endswith(",,,,")
