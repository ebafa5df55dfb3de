"""The shipped model is what it says: an ordinary checkpoint, the committed weights, and it speaks."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset import reference

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(reference.path(), dtype=torch.float32).eval()


def test_the_folder_is_small_enough_to_ship() -> None:
    assert sum(path.stat().st_size for path in reference.path().iterdir()) <= 36_000_000


def test_the_weights_have_the_committed_digest() -> None:
    digests = json.loads((reference.path() / "digest.json").read_text())
    for name, digest in digests.items():
        assert hashlib.sha256((reference.path() / name).read_bytes()).hexdigest() == digest


def test_the_weights_are_stored_in_bfloat16() -> None:
    from safetensors import safe_open

    with safe_open(reference.path() / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118 - not a dict


def test_the_shape_is_the_one_of_the_traces(model: Any) -> None:
    config, shape = model.config, reference.trace("it").shape
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (8, 64, 8)
    assert (shape.layers, shape.experts, shape.top_k) == (8, 64, 8)
    assert shape.expert_bytes == 3 * config.hidden_size * config.moe_intermediate_size * 2


@pytest.mark.parametrize("domain", reference.DOMAINS)
def test_logits_are_finite_and_better_than_chance(model: Any, tokenizer: Any, domain: str) -> None:
    batch = tokenizer(reference.workload(domain).prompts[0].text, return_tensors="pt")
    with torch.no_grad():
        out = model(**batch, labels=batch["input_ids"])
    assert torch.isfinite(out.logits).all()
    assert out.loss < 6.0  # an even guess over the vocabulary is 9.0


def test_it_generates_and_repeats_itself_exactly(model: Any, tokenizer: Any) -> None:
    batch = tokenizer("Per installare il sistema", return_tensors="pt")
    first = model.generate(**batch, max_new_tokens=24, do_sample=False)
    assert first.shape[1] == batch["input_ids"].shape[1] + 24
    assert torch.equal(first, model.generate(**batch, max_new_tokens=24, do_sample=False))
    assert tokenizer.decode(first[0]).startswith("Per installare il sistema")


@pytest.mark.parametrize("name", reference.workloads())
def test_the_tokenizer_gives_every_prompt_back(tokenizer: Any, name: str) -> None:
    for prompt in reference.workload(name).prompts:
        assert tokenizer.decode(tokenizer(prompt.text).input_ids) == prompt.text


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_the_tokenizer_gives_any_text_back(text: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(reference.path()) if not _CACHE else _CACHE[0]
    _CACHE[:] = [tokenizer]
    if "<|endoftext|>" not in text:
        assert tokenizer.decode(tokenizer(text).input_ids) == text


_CACHE: list[Any] = []


def test_a_chat_template_is_there(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Ciao"}], tokenize=False)
    assert "Ciao" in text


@pytest.mark.parametrize("name", ["it", "c"])
def test_the_trace_is_what_the_routers_choose(model: Any, name: str) -> None:
    trace = reference.trace(name)
    ids = torch.from_numpy(trace.token_ids[trace.request == 0].astype("int64"))[None]
    chosen = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: chosen.append(out[2])) for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    recorded = torch.from_numpy(trace.experts[trace.request == 0].astype("int64"))
    found = torch.stack(chosen, dim=1)
    same = (recorded[..., :, None] == found[..., None, :]).any(-1).float().mean()
    assert same > 0.99  # another kernel may order two nearly equal experts differently


def test_a_request_of_the_trace_is_its_prompt(tokenizer: Any) -> None:
    trace = reference.trace("de")
    first = (trace.request == 3) & (trace.phase == 0)
    assert tokenizer.decode(trace.token_ids[first]) == reference.workload("de").prompts[3].text
