"""Gradients through experts in slots are stock's: of embeddings, attention, routers and norms."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402

import hotset  # noqa: E402
from hotset import reference  # noqa: E402
from hotset.engine.kernels.cpu import PerExpertKernels  # noqa: E402
from hotset.errors import ClosedError, ModelError, StoreError  # noqa: E402

BIT_EQUAL = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "jetmoe", "longcat_flash", "switch_transformers"]
CLOSE = ["llama4", "dbrx", "muse_spark"]  # other kernels than stock's, or another order of sums
Gradients = dict[str, Any]


def cared_for(model: Any) -> set[str]:
    """What is trained: all but the experts."""
    return {name for name, _ in model.named_parameters()}


def loss_of(model: Any, given: dict[str, Any]) -> Any:
    with tiny.quiet():
        out = model(**given)
    found = out.logits if getattr(out, "logits", None) is not None else out.last_hidden_state
    push = torch.randn(found.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return (found.float() * push).sum()


def gradients(model: Any, given: dict[str, Any]) -> Gradients:
    model.zero_grad()
    loss_of(model, given).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@cache
def expected(name: str, dtype: Any, mode: str) -> Gradients:
    stock = tiny.make(name).to(dtype).train(mode == "train")
    return gradients(stock, tiny.inputs(name, stock))


def attached(name: str, dtype: Any = torch.float32, memory: str = "25%", **options: Any) -> Any:
    return hotset.attach(tiny.make(name).to(dtype), memory=memory, **options)


def error(found: Gradients, truth: Gradients) -> float:
    """The largest error of a gradient, as a share of its size."""
    return max(float((found[n] - truth[n]).norm() / (truth[n].norm() + 1e-12)) for n in found)


def assert_equal(found: Gradients, wanted: Gradients, model: Any, tolerance: float) -> None:
    assert set(found) == set(wanted) & cared_for(model)
    assert len(found) > 10
    for name, value in found.items():
        if tolerance:
            assert (value - wanted[name]).norm() <= tolerance * wanted[name].norm() + 1e-7, name
        else:
            assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", BIT_EQUAL + CLOSE)
def test_gradients_are_stocks(name: str, mode: str) -> None:
    if mode == "train" and name == "switch_transformers":
        pytest.skip("its experts have dropout: refused, as the test below says")
    wanted = expected(name, torch.float32, mode)
    model = attached(name).train(mode == "train")
    found = gradients(model, tiny.inputs(name, model))
    assert_equal(found, wanted, model, 0 if name in BIT_EQUAL else 1e-5)
    fetched = model.hotset.stats()["backward"]
    assert fetched["fetched"] > 0
    assert fetched["resident"] > 0
    model.hotset.close()


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_gradients_in_bfloat16_are_as_near_to_the_truth_as_stocks(name: str) -> None:
    stock, model = expected(name, torch.bfloat16, "eval"), attached(name, torch.bfloat16)
    found = gradients(model, tiny.inputs(name, model))
    truth = expected_in_float32_of_bfloat16(name)
    kept = {key: stock[key].float() for key in found}
    assert error({key: value.float() for key, value in found.items()}, truth) <= 1.1 * error(kept, truth) + 1e-3
    model.hotset.close()


def expected_in_float32_of_bfloat16(name: str) -> Gradients:
    """The gradients of the model with the same, rounded weights, computed in float32."""
    stock = tiny.make(name).to(torch.bfloat16).float()
    return gradients(stock, tiny.inputs(name, stock))


@pytest.mark.parametrize("name", ["gpt_oss", "muse_spark"])
def test_the_bits_of_gradients_do_not_depend_on_the_budget(name: str) -> None:
    found = []
    for memory in ("25%", "50%", "100%" if name == "dbrx" else "75%"):
        model = attached(name, memory=memory)
        found.append(gradients(model, tiny.inputs(name, model)))
        model.hotset.close()
    for other in found[1:]:
        assert all(torch.equal(found[0][key], other[key]) for key in found[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_give_the_same_gradients_and_leave_the_books_alone(reentrant: bool) -> None:
    name = "qwen3_moe"
    wanted = expected(name, torch.float32, "train")
    plain, model = attached(name).train(), attached(name).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    given = tiny.inputs(name, model)
    if reentrant:
        model.enable_input_require_grads()
    gradients(plain, given)
    with model.hotset.trace() as recording:
        found = gradients(model, given)
    assert_equal(found, wanted, model, 0)
    trace = recording.finish()
    assert trace.tokens == given["input_ids"].numel()
    keys = ("asked", "hits", "misses", "passes", "tokens", "loaded_bytes", "prefill", "decode")
    ours, theirs = model.hotset.stats(), plain.hotset.stats()
    assert {key: ours[key] for key in keys} == {key: theirs[key] for key in keys}
    assert ours["backward"]["events"] == 2 * theirs["backward"]["events"]  # once to compute again, once backward
    plain.hotset.close()
    model.hotset.close()


def test_a_model_whose_experts_fit_trains_as_stock_also_while_it_is_recorded() -> None:
    name = "qwen3_moe"
    wanted = expected(name, torch.float32, "train")
    model = attached(name, memory="100%").train()
    model.gradient_checkpointing_enable()
    with model.hotset.trace() as recording:
        found = gradients(model, tiny.inputs(name, model))
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert recording.finish().tokens == tiny.inputs(name, model)["input_ids"].numel()
    model.hotset.close()


class LoRA(torch.nn.Module):
    """A frozen linear map with two small matrices beside it, as PEFT wraps it."""

    def __init__(self, base: torch.nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.a = torch.nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = torch.nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, given: Any) -> Any:
        return self.base(given) + given @ self.a.T @ self.b.T


def with_lora(model: Any) -> Any:
    model.requires_grad_(False)
    torch.manual_seed(7)
    for layer in model.model.layers:
        for part in ("q_proj", "v_proj"):
            setattr(layer.self_attn, part, LoRA(getattr(layer.self_attn, part)))
    return model.train()


def losses(model: Any, ids: Any, steps: int = 4) -> list[float]:
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, found = torch.optim.AdamW(learnt, lr=1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        with tiny.quiet():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_lora_on_attention_trains_as_on_stock(checkpointing: bool | None, tmp_path: Path) -> None:
    tiny.save("qwen3_moe", tmp_path)
    with tiny.quiet():
        stock, model = tiny.load("qwen3_moe", tmp_path), hotset.load(str(tmp_path), memory="25%", dtype=torch.float32)
    ids = tiny.inputs("qwen3_moe", stock)["input_ids"]
    found = []
    for one in (with_lora(stock), with_lora(model)):
        if checkpointing is not None:
            one.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            one.enable_input_require_grads()
        found.append(losses(one, ids))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[0][-1] < found[0][0]
    model.hotset.close()


def test_the_reference_model_has_stocks_gradients() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = str(reference.path())
    ids = AutoTokenizer.from_pretrained(path)("La storia della citta", return_tensors="pt").input_ids
    with tiny.quiet():
        stock = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model = hotset.load(path, memory="25%", dtype=torch.float32)
    wanted, found = gradients(stock, {"input_ids": ids}), gradients(model, {"input_ids": ids})
    assert_equal(found, wanted, model, 1e-4)
    model.hotset.close()


def test_without_anything_to_learn_nothing_is_kept_for_a_backward_pass() -> None:
    model = attached("qwen3_moe")
    given = tiny.inputs("qwen3_moe", model)
    wanted = tiny.logits(model, given)
    model.requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(lambda _: pytest.fail("something was saved"), lambda x: x):
        found = model(**given).logits
    assert found.grad_fn is None
    assert torch.equal(found, wanted)
    assert model.hotset.stats()["backward"] == {"events": 0, "resident": 0, "fetched": 0, "fetched_bytes": 0}
    model.hotset.close()


def test_what_gradients_cannot_do_is_refused() -> None:
    model = attached("qwen3_moe")
    given = tiny.inputs("qwen3_moe", model)
    wanted = expected("qwen3_moe", torch.float32, "eval")
    experts = model.hotset.moe_layers[0].module
    hidden, weights = torch.randn(3, experts.hidden_dim, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    out = experts(hidden, torch.tensor([[0, 1], [2, 3], [4, 5]]), weights)
    (first,) = torch.autograd.grad(out.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    experts.gate_up_proj.requires_grad_()
    with pytest.raises(ModelError, match="frozen"):
        model(**given)
    experts.gate_up_proj.requires_grad_(False)
    assert_equal(gradients(model, given), wanted, model, 0)
    loss = loss_of(model, given)
    model.hotset.close()
    with pytest.raises(ClosedError):
        loss.backward()


def test_a_failed_read_in_a_backward_pass_raises_and_the_next_one_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    model = attached("qwen3_moe", prefetch="off")
    given = tiny.inputs("qwen3_moe", model)
    loss = loss_of(model, given)

    def broken(*_: Any) -> None:
        raise StoreError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(type(model.hotset.engine.offload.mover.readers), "bring", broken)
        with pytest.raises(StoreError, match="the disk is gone"):
            loss.backward()
    assert_equal(gradients(model, given), expected("qwen3_moe", torch.float32, "eval"), model, 0)
    model.hotset.close()


def test_an_interrupt_in_a_backward_pass_leaves_the_next_one_right(monkeypatch: pytest.MonkeyPatch) -> None:
    model = attached("qwen3_moe", prefetch="off")
    given = tiny.inputs("qwen3_moe", model)
    plain = PerExpertKernels.differentiable

    def interrupted(*args: Any) -> Any:
        if next(left) == 0:
            raise KeyboardInterrupt
        return plain(*args)

    for calls in (0, 2, 3, 8, 13):  # among residents, among those that arrive, in the next layers
        left = iter(range(calls, -1, -1))
        loss = loss_of(model, given)
        with monkeypatch.context() as patch:
            patch.setattr(PerExpertKernels, "differentiable", interrupted)
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
        assert_equal(gradients(model, given), expected("qwen3_moe", torch.float32, "eval"), model, 0)
    model.hotset.close()


@pytest.mark.parametrize("grad", [True, False])
def test_dropout_among_experts_is_refused_in_training_mode(grad: bool) -> None:
    model = attached("switch_transformers").train()
    with torch.set_grad_enabled(grad), pytest.raises(ModelError, match=r"model\.eval\(\), where gradients are right"):
        model(**tiny.inputs("switch_transformers", model))
    model.eval()(**tiny.inputs("switch_transformers", model))
    model.hotset.close()
