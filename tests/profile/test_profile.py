"""Profiles: their file, their refusals, merging and comparing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotset.errors import ProfileError
from hotset.profile import Fingerprint, Profile
from hotset.profile.combine import cosine, merge, shared_hot_set
from hotset.profile.folder import folder, known, locate
from hotset.shape import ModelShape

SHAPE = ModelShape(3, 8, 2, 4096)
MARK = Fingerprint("Qwen3MoeForCausalLM", "abc")


def make(seed: int = 0, **changes: object) -> Profile:
    random = np.random.default_rng(seed)
    profile = Profile(
        shape=SHAPE,
        fingerprint=MARK,
        uses=random.gamma(0.5, size=(2, 3, 8)),
        tokens=np.array([30, 70]),
        created="2026-11-01",
        updated="2026-11-15",
        policy="blend",
        learnt={"rates": random.random((3, 8, 7)), "weights": random.random(7).astype(np.float32)},
        meta={"name": "italian"},
    )
    return replace(profile, **changes)  # type: ignore[arg-type]


def test_saving_what_was_loaded_gives_the_same_bytes(tmp_path: Path) -> None:
    make().save(tmp_path / "a.safetensors")
    Profile.load(tmp_path / "a.safetensors").save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_all_of_it_comes_back(tmp_path: Path) -> None:
    profile = make()
    profile.save(tmp_path / "p.safetensors")
    found = Profile.load(tmp_path / "p.safetensors")
    assert np.array_equal(found.uses, profile.uses)
    assert (found.shape, found.fingerprint, found.policy, found.meta) == (SHAPE, MARK, "blend", {"name": "italian"})
    assert all(np.array_equal(found.learnt[key], profile.learnt[key]) for key in profile.learnt)
    assert found.learnt["weights"].dtype == np.float32


def test_the_hottest_come_first() -> None:
    uses = np.zeros((2, 3, 8))
    uses[1, 1, [5, 2]] = 30, 10
    profile = make(uses=uses)
    assert [key.expert for key, _ in profile.top(1, 2)] == [5, 2]
    assert profile.top(1, 1)[0][1] == pytest.approx(2 * 0.75)
    assert profile.hotness()[0].sum() == 0


@pytest.mark.parametrize(
    ("shape", "mark", "foreign", "message"),
    [
        (ModelShape(3, 16, 2), MARK, False, "3 x 8 experts, and this one has 3 x 16"),
        (SHAPE, Fingerprint("MixtralForCausalLM", "abc"), True, "Qwen3MoeForCausalLM model, and this is a Mixtral"),
        (SHAPE, Fingerprint("Qwen3MoeForCausalLM", "xyz"), False, "--allow-foreign"),
    ],
)
def test_a_foreign_profile_is_refused_by_name(
    shape: ModelShape, mark: Fingerprint, foreign: bool, message: str
) -> None:
    with pytest.raises(ProfileError, match=message):
        make().check(shape, mark, allow_foreign=foreign)


def test_a_fine_tune_may_use_it_if_asked() -> None:
    make().check(SHAPE, Fingerprint("Qwen3MoeForCausalLM", "xyz"), allow_foreign=True)


@given(st.integers(0, 50), st.integers(51, 99), st.integers(100, 150))
def test_merging_is_associative(a: int, b: int, c: int) -> None:
    parts = [make(seed) for seed in (a, b, c)]
    left = merge([merge(parts[:2]), parts[2]])
    right = merge([parts[0], merge(parts[1:])])
    assert np.allclose(left.uses, right.uses, rtol=1e-12)
    assert (left.tokens == right.tokens).all()


def test_weights_count() -> None:
    merged = merge([make(1), make(2)], [2, 1])
    assert np.allclose(merged.uses, 2 * make(1).uses + make(2).uses)
    for wrong in ([1], [1, 0], [1, float("nan")]):
        with pytest.raises(ProfileError, match="positive weights"):
            merge([make(1), make(2)], wrong)


def test_likeness() -> None:
    assert np.allclose(cosine(make(1), make(1)), 1)
    assert (cosine(make(1), make(2)) < 1).all()
    assert shared_hot_set(make(1), make(1), 3) == 1
    assert shared_hot_set(make(1), make(2), 8) == 1


@given(data=st.data())
def test_damaged_files_give_an_error_and_no_crash(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("p") / "p.safetensors"
    make().save(path)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, min(len(content) - 1, 900)))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content))
    try:
        Profile.load(path)
    except ProfileError as error:
        assert str(path) in str(error)  # noqa: PT017 - most damages are refused, some do not matter


def test_names_lead_to_the_folder_and_paths_to_themselves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert locate("italian-chat") == folder() / "italian-chat.safetensors"
    assert locate("./here.safetensors") == Path("here.safetensors")
    assert known() == {}
    folder().mkdir(parents=True)
    make().save(locate("it"))
    assert list(known()) == ["it"]
    with pytest.raises(ProfileError, match="no name for a profile"):
        locate("../x".replace("/", ":"))
