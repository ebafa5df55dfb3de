"""Long prompts go in chunks: the text is stock's, a chunk is a step of one request; what has no room is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hotset  # noqa: E402
from hotset import Phase, policies, reference  # noqa: E402
from hotset.cache.controller import Controller  # noqa: E402
from hotset.engine.kernels.cpu import RowExperts  # noqa: E402
from hotset.errors import BudgetError  # noqa: E402
from hotset.models import connect  # noqa: E402
from hotset.models.footprint import MIN_ROWS, Footprint  # noqa: E402
from hotset.models.prompt_chunks import PromptChunks  # noqa: E402

LENGTH = 5 * MIN_ROWS + 3


@contextmanager
def chunked(memory: str = "25%", **options: Any) -> Iterator[Any]:
    """The reference model, whose prompts are split as finely as they ever are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connect, "chunk_bytes", lambda _: 0)
        model = hotset.load(reference.path(), memory=memory, device="cpu", dtype=torch.float32, **options)
    with model.hotset:
        yield model


def prompt(batch: int = 1, length: int = LENGTH) -> dict[str, Any]:
    """A prompt of some sequences; all but the first are padded."""
    ids = torch.randint(10, 8000, (batch, length), generator=torch.Generator().manual_seed(batch))
    mask = torch.ones_like(ids)
    mask[1:, : length // 3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def greedy(model: Any, given: dict[str, Any], **options: Any) -> Any:
    return model.generate(**given, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0, **options)


def steps_of(model: Any, given: dict[str, Any], **options: Any) -> tuple[list[Any], Any]:
    seen: list[Any] = []
    end = model.hotset.engine.end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.hotset.engine, "end", lambda step, s: (seen.append(step), end(step, s)))
        text = greedy(model, given, **options)
    return seen, text


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("memory", ["25%", "100%"])
def test_a_prompt_in_chunks_gives_the_text_of_stock_and_is_one_request(stock: Any, batch: int, memory: str) -> None:
    given = prompt(batch)
    with chunked(memory) as model:
        steps, text = steps_of(model, given)
    assert torch.equal(text, greedy(stock, given))
    prefill = [step.length for step in steps if step.phase is Phase.PREFILL]
    assert len(prefill) == 6
    assert sum(prefill) == LENGTH
    assert 1 < max(prefill) <= MIN_ROWS
    assert [step.phase for step in steps[6:]] == [Phase.DECODE] * 7
    assert {step.first_request for step in steps} == {steps[0].first_request}


def test_a_cache_of_fixed_size_takes_chunks_too(stock: Any) -> None:
    given, fixed = prompt(2), {"cache_implementation": "static", "disable_compile": True}
    with chunked() as model:
        steps, text = steps_of(model, given, **fixed)
    assert [step.length > 1 for step in steps[:7]] == [True] * 6 + [False]
    assert torch.equal(text, greedy(stock, given, **fixed))


def test_the_next_turn_of_a_chat_goes_on_in_chunks_as_a_request_of_its_own(stock: Any) -> None:
    from transformers import DynamicCache

    whole = prompt(1, 2 * LENGTH)["input_ids"]
    with chunked() as model:
        cache = DynamicCache(config=model.config)
        first, text = steps_of(model, {"input_ids": whole[:, :LENGTH]}, past_key_values=cache)
        ids = torch.cat([text, whole[:, LENGTH:]], dim=1)
        second, text = steps_of(model, {"input_ids": ids}, past_key_values=cache)
    assert {step.first_request for step in second} == {first[0].first_request + 1}
    assert len([step for step in second if step.phase is Phase.PREFILL]) > 3
    assert torch.equal(text, greedy(stock, {"input_ids": ids}))


def test_what_is_asked_for_beyond_the_last_logits_is_computed_in_one_pass(stock: Any) -> None:
    given = prompt()
    with chunked() as model, torch.no_grad():
        assert model(**given).logits.shape[1] == LENGTH
        assert torch.allclose(model(**given).logits, stock(**given).logits, atol=1e-4)
        steps, _ = steps_of(model, given, use_cache=False)
        assert steps[0].length == LENGTH


def test_replaying_a_run_with_chunks_gives_the_same_loads_in_the_same_order(tmp_path: Path) -> None:
    live: list[Any] = []
    with chunked() as model:
        listen = lambda layer, rows: live.append(np.column_stack([np.full(len(rows), layer), rows]))  # noqa: E731
        model.hotset.engine.stats.listen(listen)
        with model.hotset.trace(tmp_path / "run.safetensors"):
            greedy(model, prompt(1))
            greedy(model, prompt(2))
        plan = model.hotset.engine.controller.plan
    trace = hotset.Trace.load(tmp_path / "run.safetensors")
    assert trace.requests == 3
    assert trace.count(Phase.PREFILL) == 3 * LENGTH
    replayed = Controller(plan, policies.parse("blend")).replay(trace.events(), log=True)
    assert np.array_equal(np.concatenate(live), replayed.log)


def test_a_prompt_that_finds_no_room_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(connect, "free_bytes", lambda _: 1 << 18)
        model = hotset.load(reference.path(), memory="25%", device="cpu", dtype=torch.float32)
        with model.hotset, pytest.raises(BudgetError, match=r"a prompt of 2 x 83 tokens needs .* --context 678"):
            greedy(model, prompt(2))
        assert model.hotset.tracker.steps == 0
        forced = hotset.load(reference.path(), memory="25%", device="cpu", dtype=torch.float32, force=True)
        with forced.hotset:
            assert greedy(forced, prompt(2)).shape == (2, LENGTH + 8)


def test_chunks_are_as_long_as_activations_stay_below_the_bound(stock: Any) -> None:
    footprint = Footprint.of(stock, 8)
    for bound in (32 << 20, 256 << 20, 2 << 30):
        for batch, context in ((1, 4096), (4, 4096), (1, 32_000)):
            rows = footprint.rows_within(bound, batch, context)
            assert footprint.pass_bytes(batch, rows, context) <= bound or rows == MIN_ROWS
            assert footprint.pass_bytes(batch, rows + 1, context) > bound
    assert footprint.cached_bytes(1000) == 1000 * 8 * 2 * 2 * 64 * 4


def test_states_that_begin_anew_with_every_prompt_are_not_split() -> None:
    from transformers import DynamicCache, Qwen3NextConfig

    from hotset.models import prompt_chunks

    hybrid = DynamicCache(config=Qwen3NextConfig(num_hidden_layers=4))
    assert not prompt_chunks._takes_pieces(hybrid)
    assert prompt_chunks._takes_pieces(DynamicCache())


def test_positions_that_turn_by_the_length_of_the_prompt_are_not_split(stock: Any) -> None:
    from transformers import PhimoeConfig

    from hotset.models import prompt_chunks

    long = {"rope_type": "longrope", "long_factor": [2.0] * 64, "short_factor": [1.0] * 64, "rope_theta": 1e4}
    assert prompt_chunks._turns_by_length(
        PhimoeConfig(rope_parameters=long | {"short_mscale": 1.2, "long_mscale": 1.2})
    )
    assert not prompt_chunks._turns_by_length(stock.config)


def test_rows_are_computed_in_parts_and_every_expert_s_parts_depend_on_its_own_rows_alone() -> None:
    experts = RowExperts.__new__(RowExperts)
    experts.max_inputs = 10
    ends = [3, 7, 9, 40, 41, 55]
    parts = list(experts.parts(ends))
    assert [part.begin for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == 55
    assert all(part.end - part.begin <= 10 for part in parts)
    cuts = {end - 9 for part in parts if 9 < (end := part.end) < 40}
    alone = {part.end for part in experts.parts([31]) if part.end < 31}
    assert cuts == alone == {10, 20, 30}


def test_a_large_event_in_parts_computes_the_same_bits() -> None:
    hidden = torch.randn(700, 256, generator=torch.Generator().manual_seed(0))
    with chunked() as model, torch.no_grad():
        layer = model.model.layers[0].mlp
        whole = layer(hidden[None])
        for kernels in model.hotset.engine.offload.driver.kernels:
            kernels.experts.max_inputs = 150
        assert torch.equal(layer(hidden[None])[0] if isinstance(whole, tuple) else layer(hidden[None]), whole)


def test_the_hook_goes_with_the_model() -> None:
    model = hotset.load(reference.path(), memory="25%", device="cpu")
    hooks = [getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values()]
    assert sum(isinstance(hook, PromptChunks) for hook in hooks) == 1
    hotset.detach(model)
    assert not any(isinstance(getattr(h, "__self__", None), PromptChunks) for h in model._forward_pre_hooks.values())
