"""Drafted tokens are verified in decode steps: one answer is one request, and the cache learns and admits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from steps_seen import steps_seen  # noqa: E402

import hotset  # noqa: E402
from hotset import Phase, reference  # noqa: E402
from hotset.engine.step import Step  # noqa: E402
from hotset.sim import Sweep, simulate  # noqa: E402
from hotset.trace import Trace  # noqa: E402

TOKENS = 24
IDS = [5, 9, 31, 7, 5, 9, 31, 7, 5, 9]  # it repeats itself, so that there is something to look up


@pytest.fixture(scope="module")
def model() -> Any:
    loaded = hotset.load(reference.path(), memory="25%", device="cpu", prefetch="off")
    yield loaded
    loaded.hotset.close()


@pytest.fixture(scope="module")
def assistant() -> Any:
    loaded = hotset.load(reference.path(), memory="25%", device="cpu", prefetch="off")
    yield loaded
    loaded.hotset.close()


def answer(model: Any, ids: list[int] = IDS, **how: Any) -> list[int]:
    given = torch.tensor([ids])
    found: list[int] = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
        pad_token_id=0, **how,
    )[0].tolist()  # fmt: skip
    return found


def check(seen: list[Step]) -> None:
    """One prompt, then decode only, some of it several tokens long, all of one request."""
    assert [step.phase for step in seen] == [Phase.PREFILL] + [Phase.DECODE] * (len(seen) - 1)
    assert len({step.first_request for step in seen}) == 1
    assert any(step.length > 1 for step in seen[1:])


def test_prompt_lookup_decodes(model: Any) -> None:
    plain = answer(model)
    model.hotset.reset_stats()
    before = model.hotset.tracker.requests
    with steps_seen(model) as seen:
        assert answer(model, prompt_lookup_num_tokens=4) == plain
    check(seen)
    assert model.hotset.tracker.requests == before + 1
    stats = model.hotset.stats()
    assert stats["decode"]["admitted"] > 0  # in a full cache a prompt would put nothing in
    assert stats["prefill"]["pass_tokens"] == seen[0].length


def test_an_assistant_model_drafts_for_one_request_of_each_model(model: Any, assistant: Any) -> None:
    plain = answer(model)
    before = assistant.hotset.tracker.requests
    with steps_seen(model) as seen, steps_seen(assistant) as drafted:
        assert answer(model, assistant_model=assistant) == plain
    check(seen)
    assert [step.phase for step in drafted] == [Phase.PREFILL] + [Phase.DECODE] * (len(drafted) - 1)
    assert assistant.hotset.tracker.requests == before + 1


def test_blend_learns_from_verified_tokens(model: Any) -> None:
    """The weights move at events of decode only, so they move as often as there are such events."""
    state = model.hotset.engine.controller.state
    moved = 0
    with steps_seen(model) as seen:
        engine = model.hotset.engine
        end = engine.end

        def watched(step: Step, seconds: float) -> None:
            nonlocal moved
            moved += step.length > 1 and not np.array_equal(before[0], state.own)
            before[0] = state.own.copy()
            end(step, seconds)

        before = [state.own.copy()]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "end", watched)
            answer(model, [31, 7, 9, 31, 7, 9, 31, 7], prompt_lookup_num_tokens=4)
    assert moved == sum(step.length > 1 for step in seen[1:])


def test_a_turn_after_drafts_is_a_request_of_its_own(model: Any) -> None:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with steps_seen(model) as first:
        said = answer(model, past_key_values=cache, prompt_lookup_num_tokens=4)
    with steps_seen(model) as second:
        answer(model, [*said, 8, 2, 4, 6], past_key_values=cache, prompt_lookup_num_tokens=4)
    check(first)
    check(second)
    assert second[0].first_request == first[0].first_request + 1


def test_drafts_of_ones_own_loop_are_decode_after_a_token_or_a_rollback(model: Any) -> None:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with steps_seen(model) as seen, torch.no_grad():
        for piece, rejected in (
            ([5, 9, 31, 7], 0),
            ([8, 2, 4], 2),
            ([6, 1, 3, 9], 1),
            ([4], 0),
            ([5, 6, 7], 1),
            ([2], 0),
        ):
            model(input_ids=torch.tensor([piece]), past_key_values=cache, use_cache=True)
            if rejected:
                cache.crop(-rejected)
    assert len({step.first_request for step in seen}) == 1
    # Nothing tells the first draft from a piece of the prompt; then tokens were taken out again.
    assert [step.phase for step in seen] == [Phase.PREFILL] * 2 + [Phase.DECODE] * 4


def test_a_recording_with_drafts_is_replayed_as_it_ran(tmp_path: Path) -> None:
    with hotset.load(reference.path(), memory="25%", device="cpu", prefetch="off").hotset as handle:
        with handle.trace(tmp_path / "drafts.safetensors"):
            answer(handle._model(), prompt_lookup_num_tokens=4)
        stats = handle.stats()
    trace = Trace.load(tmp_path / "drafts.safetensors")
    assert trace.requests == 1
    sweep = Sweep(policies=[stats["policy"]], budgets=[f"{stats['slots']} slots"], fit=0)
    rows = {row.phase: row for row in simulate({"run": trace}, sweep).rows if row.policy == stats["policy"]}
    for phase in ("prefill", "decode"):
        assert (rows[phase].hits, rows[phase].misses) == (stats[phase]["hits"], stats[phase]["misses"])
