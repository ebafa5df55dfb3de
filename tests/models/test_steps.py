"""Whose tokens a step computes: every answer is a request of its own, also in a chat that keeps its cache."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


import tiny_models as tiny  # noqa: E402
from steps_seen import steps_seen  # noqa: E402

import hotset  # noqa: E402
from hotset import Phase, reference  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Any:
    loaded = hotset.load(reference.path(), memory="25%", device="cpu", prefetch="off")
    yield loaded
    loaded.hotset.close()


def steps_of(model: Any, *calls: dict[str, Any]) -> list[tuple[int, Phase, int]]:
    """The request, the phase and the length of every step, requests counted from the first."""
    with steps_seen(model) as seen:
        for call in calls:
            model.generate(max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0, **call)
    return [(step.first_request - seen[0].first_request, step.phase, step.length) for step in seen]


def test_each_generate_is_a_request(model: Any) -> None:
    ids = torch.tensor([[5, 9, 31]])
    found = steps_of(model, {"input_ids": ids}, {"input_ids": ids})
    one = [(Phase.PREFILL, 3), (Phase.DECODE, 1), (Phase.DECODE, 1)]
    assert found == [(0, *each) for each in one] + [(1, *each) for each in one]


def test_a_turn_that_goes_on_with_the_cache_is_a_request_of_its_own(model: Any) -> None:
    from transformers import DynamicCache

    cache, ids = DynamicCache(config=model.config), torch.tensor([[5, 9, 31]])
    longer = torch.tensor([[5, 9, 31, 7, 8, 2, 4, 6]])
    found = steps_of(
        model, {"input_ids": ids, "past_key_values": cache}, {"input_ids": longer, "past_key_values": cache}
    )
    assert [request for request, _, _ in found] == [0, 0, 0, 1, 1, 1]
    assert found[3][1] is Phase.PREFILL
    assert 1 < found[3][2] < 8  # the cache was used


def test_a_prompt_in_pieces_is_one_request(model: Any) -> None:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with steps_seen(model) as seen, torch.no_grad():
        for piece in ([5, 9, 31], [7, 8], [2], [4]):
            model(input_ids=torch.tensor([piece]), past_key_values=cache, use_cache=True)
    assert len({step.first_request for step in seen}) == 1
    assert [step.phase for step in seen] == [Phase.PREFILL, Phase.PREFILL, Phase.DECODE, Phase.DECODE]


def test_a_batch_is_as_many_requests_as_it_has_rows(model: Any) -> None:
    ids = torch.tensor([[5, 9, 31], [7, 8, 2]])
    found = steps_of(model, {"input_ids": ids}, {"input_ids": ids[:1]})
    assert [request for request, _, _ in found] == [0, 0, 0, 2, 2, 2]


def test_an_interrupt_in_a_pass_does_not_end_the_counting(model: Any) -> None:
    """torch calls no hook after it: the next pass begins as if nothing had been under way."""
    ids = torch.tensor([[5, 9, 31]])

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[0].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(ids)
    handle.remove()
    assert [phase for _, phase, _ in steps_of(model, {"input_ids": ids})] == [
        Phase.PREFILL,
        Phase.DECODE,
        Phase.DECODE,
    ]


def test_a_cache_that_the_model_makes_is_known_by_the_next_call(model: Any) -> None:
    """In between, the thread does something else: the cache alone says whose the token is."""
    with steps_seen(model) as seen, torch.no_grad():
        out = model(input_ids=torch.tensor([[5, 9, 31]]), use_cache=True)
        model(input_ids=torch.tensor([[7, 8]]))
        model(input_ids=torch.tensor([[4]]), past_key_values=out.past_key_values, use_cache=True)
    assert [step.first_request - seen[0].first_request for step in seen] == [0, 1, 0]
    assert [step.phase for step in seen] == [Phase.PREFILL, Phase.PREFILL, Phase.DECODE]


def test_a_step_of_one_model_inside_that_of_another_is_its_own(model: Any) -> None:
    other = hotset.load(reference.path(), memory="25%", device="cpu", prefetch="off")
    ids = torch.tensor([[5, 9, 31]])

    def nested(*_: Any) -> None:
        with torch.no_grad():
            other(ids[:, :2])

    hook = model.model.layers[4].register_forward_pre_hook(nested)
    with steps_seen(model) as outer, steps_seen(other) as inner, torch.no_grad():
        model(ids)
    hook.remove()
    requests = model.hotset.requests()[-1], other.hotset.requests()[-1]
    other.hotset.close()
    assert [(step.batch, step.length) for step in outer + inner] == [(1, 3), (1, 2)]
    assert [request.as_dict()["prefill"]["events"] for request in requests] == [8, 8]


@pytest.mark.parametrize("family", ["switch_transformers", "nllb_moe"])
def test_an_encoder_that_runs_alone_is_part_of_its_decoders_request(family: str) -> None:
    attached = hotset.attach(tiny.make(family), memory="50%")
    ids = tiny.inputs(family, attached)["input_ids"][:1]
    with steps_seen(attached) as seen, attached.hotset.trace() as recorder:
        for _ in range(2):
            attached.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False, num_beams=1)
    found = [request.as_dict() for request in attached.hotset.requests()]
    trace = recorder.finish()
    attached.hotset.close()
    assert [step.first_request for step in seen] == [0] * 4 + [1] * 4  # the encoder, then three tokens
    assert [each["decode_tokens"] for each in found] == [2, 2]
    assert (trace.requests, trace.steps) == (2, 8)
