"""Families with code of their own for experts compute what stock computes, with a few experts in memory at a time."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny_models as tiny
import torch
import transformers
from family_scan import OUT_OF_SCOPE, classes_of
from tiny_configs import tiny_config
from torch import nn

import hotset
from hotset.errors import ModelError
from hotset.models.adapters import adapters
from hotset.models.adapters._unsupported import REASONS
from hotset.models.find_layers import find_moe_layers


class Case(NamedTuple):
    """A tiny model: its family, what is special about it, and the class to load it with if not the usual."""

    family: str
    changes: dict[str, Any] = {}  # noqa: RUF012 - never changed
    load_with: Any = None

    def __str__(self) -> str:
        return "-".join([self.family, *(f"{key}={value}" for key, value in self.changes.items())])


SEQ2SEQ = transformers.AutoModelForSeq2SeqLM
CASES = [
    Case("dbrx"),
    Case("jetmoe"),
    Case("llama4"),
    Case("llama4", {"num_experts_per_tok": 1}),
    Case("llama4", {"interleave_moe_layer_step": 2}),
    Case("longcat_flash"),
    Case("longcat_flash", {"zero_expert_num": 0}),
    Case("longcat_flash", {"moe_topk": 6, "zero_expert_num": 16}),
    Case("step3p7"),
    Case("step3p7", {"swiglu_limits": [0.0, 0.5, 0.5]}),
    Case("switch_transformers", {}, SEQ2SEQ),
    Case("switch_transformers", {"expert_capacity": 2}, SEQ2SEQ),
]
NLLB = [
    Case("nllb_moe", {}, SEQ2SEQ),
    Case("nllb_moe", {"encoder_ffn_dim": 32, "decoder_sparse_step": 2}, SEQ2SEQ),
    Case("nllb_moe", {"moe_eval_capacity_token_fraction": 0.25, "moe_token_dropout": 0.0}, SEQ2SEQ),
    Case(
        "nllb_moe", {"moe_eval_capacity_token_fraction": 0.25, "normalize_router_prob_before_dropping": True}, SEQ2SEQ
    ),
]
BUDGETS = ["6 slots", "50%", "100%"]


def saved(case: Case, folder: Path) -> Any:
    """Write the case's checkpoint and read it with the stock library."""
    model = tiny.make(case.family, **case.changes)
    with tiny.quiet():
        model.save_pretrained(folder)
    return tiny.load(case.family, folder)


def cached(case: Case, folder: Path, memory: str = "50%", **options: Any) -> Any:
    """The same checkpoint with its experts in slots."""
    auto_class = case.load_with or tiny.auto_class(case.family)
    return hotset.load(folder, memory=memory, auto_class=auto_class, **{"dtype": torch.float32} | options).eval()


def generated(model: Any, given: dict[str, torch.Tensor]) -> list[list[int]]:
    prompt = {key: value for key, value in given.items() if key != "decoder_input_ids"}
    with tiny.quiet(), torch.no_grad():
        tokens: list[list[int]] = model.generate(**prompt, max_new_tokens=8, do_sample=False).tolist()
    return tokens


def padded(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with the first sequence shortened."""
    mask = torch.ones_like(given["input_ids"])
    mask[0, -3:] = 0
    return given | {"attention_mask": mask, "input_ids": given["input_ids"].masked_fill(mask == 0, 0)}


@pytest.mark.parametrize("memory", BUDGETS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_and_tokens_are_those_of_stock(case: Case, memory: str, tmp_path: Path) -> None:
    stock = saved(case, tmp_path)
    model = cached(case, tmp_path, memory)
    given = tiny.inputs(case.family, stock)
    torch.testing.assert_close(tiny.logits(model, given), tiny.logits(stock, given), atol=1e-5, rtol=1e-5)
    if tiny.can_generate(case.family):
        assert generated(model, given) == generated(stock, given)


@pytest.mark.parametrize("case", [*CASES, *NLLB], ids=str)
def test_the_counters_agree_with_what_was_routed(case: Case, tmp_path: Path) -> None:
    given = tiny.inputs(case.family, saved(case, tmp_path))
    model = cached(case, tmp_path)
    with model.hotset.trace() as recorder:
        for _ in range(2):
            tiny.logits(model, given)
    trace, stats = recorder.finish(), model.hotset.stats()
    asked = {
        (step, layer, expert)
        for step, experts in zip(trace.step, trace.experts, strict=True)
        for layer, row in enumerate(experts)
        for expert in row[row >= 0]
    }
    assert stats["misses"] > 0
    assert stats["hits"] > 0
    assert stats["hits"] + stats["misses"] == stats["asked"] == len(asked)


@pytest.mark.parametrize("case", [*CASES, *NLLB], ids=str)
def test_experts_are_left_on_disk_and_nothing_is_said_of_it(case: Case, tmp_path: Path, caplog: Any) -> None:
    stock = saved(case, tmp_path)
    library = logging.getLogger("transformers")  # it hands nothing on to the root, where pytest listens
    library.addHandler(caplog.handler)
    try:
        model = cached(case, tmp_path)
    finally:
        library.removeHandler(caplog.handler)
    assert caplog.text == ""
    gone = {name for moe_layer in model.hotset.moe_layers for name in moe_layer.parameters()}
    assert {name for name, _ in stock.named_parameters()} - {name for name, _ in model.named_parameters()} == gone
    modules = [module for module in model.modules() if "forward" in vars(module)]
    assert len(modules) == len(model.hotset.moe_layers)
    model.hotset.close()
    model.hotset.patches.lift()  # until then the closed layers refuse
    assert not any("forward" in vars(module) for module in modules)


@pytest.mark.parametrize("case", [Case("step3p7")], ids=str)
def test_a_composite_that_stores_gate_and_up_apart(case: Case, tmp_path: Path) -> None:
    whole = classes_of(case.family)["Step3p7ForConditionalGeneration"]
    with tiny.quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stock = whole(tiny_config(case.family, whole.config_class)).eval()
        tiny.lively(stock)
        stock.save_pretrained(tmp_path)
    model = hotset.load(tmp_path, memory="50%", auto_class=whole, dtype=torch.float32).eval()
    given = tiny.inputs(case.family, stock)
    torch.testing.assert_close(tiny.logits(model, given), tiny.logits(stock, given), atol=1e-5, rtol=1e-5)
    assert generated(model, given) == generated(stock, given)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_half_precision_is_as_near_to_stock_as_rounding_allows(case: Case, tmp_path: Path) -> None:
    saved(case, tmp_path)
    stock = tiny.load(case.family, tmp_path, dtype=torch.bfloat16)
    given = tiny.inputs(case.family, stock)
    expected, got = tiny.logits(stock, given), tiny.logits(cached(case, tmp_path, dtype=torch.bfloat16), given)
    assert got.dtype == expected.dtype
    near = (got.float() - expected.float()).abs().amax(-1) < 0.1 * expected.float().std()
    assert near.float().mean() > 0.7  # where rounding does not change the choice of an expert


class SlowNllbLayer:
    """The published layer, token by token: two experts each, first choices served before second ones."""

    def __init__(self, block: Any, config: Any) -> None:
        self.router, self.experts, self.config = block.router.classifier, block.experts, config

    def __call__(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        out = torch.zeros_like(tokens)
        for token, shares in enumerate(self.shares(tokens, self.padding(mask, hidden))):
            for expert, share in shares.items():
                out[token] += share * self.experts[f"expert_{expert}"](tokens[token])
        return out.view(hidden.shape) * (1 - self.config.moe_token_dropout)

    def padding(self, mask: torch.Tensor | None, hidden: torch.Tensor) -> list[bool]:
        if mask is None:
            return [False] * hidden[..., 0].numel()
        return (mask[:, 0, -1, -hidden.shape[1] :] < 0).flatten().tolist()

    def shares(self, tokens: torch.Tensor, padding: list[bool]) -> list[dict[int, float]]:
        """Which experts each token gets, and how much of each."""
        chances = self.router(tokens).softmax(-1).tolist()
        ranked = [sorted(range(len(row)), key=lambda e, row=row: -row[e])[:2] for row in chances]
        capacity = math.ceil(self.config.moe_eval_capacity_token_fraction * len(tokens))
        room = dict.fromkeys(range(self.config.num_experts), capacity)
        served: list[dict[int, float]] = [{} for _ in ranked]
        waiting = []
        for choice in (0, 1):
            for token, experts in enumerate(ranked):
                if not padding[token]:
                    waiting.append((token, experts[choice]))
        for token, expert in waiting:
            room[expert] -= 1
            if room[expert] >= 0:
                served[token][expert] = chances[token][expert]
        before = self.config.normalize_router_prob_before_dropping
        for token, shares in enumerate(served):
            total = sum(chances[token][e] for e in ranked[token]) if before else sum(shares.values())
            served[token] = {expert: share / total for expert, share in shares.items()}
        return served


def slow_nllb(stock: Any) -> Any:
    """The stock model with the published layer in place of its own."""
    for module in stock.modules():
        if type(module).__name__ == "NllbMoeSparseMLP":
            module.forward = SlowNllbLayer(module, stock.config)
    return stock


@pytest.mark.parametrize("memory", BUDGETS)
@pytest.mark.parametrize("case", NLLB, ids=str)
def test_nllb_computes_the_published_layer(case: Case, memory: str, tmp_path: Path) -> None:
    slow = slow_nllb(saved(case, tmp_path))
    model = cached(case, tmp_path, memory)
    given = tiny.inputs(case.family, slow)
    for each in (given, padded(given)):
        torch.testing.assert_close(tiny.logits(model, each), tiny.logits(slow, each), atol=1e-5, rtol=1e-5)
        assert generated(model, each) == generated(slow, each)


def test_nllb_asks_no_expert_for_padding(tmp_path: Path) -> None:
    case = NLLB[0]
    given = padded(tiny.inputs(case.family, saved(case, tmp_path)))
    model = cached(case, tmp_path)
    with model.hotset.trace() as recorder:
        tiny.logits(model, given)
    encoder = recorder.finish().experts[:14, :2]  # the tokens of both sequences, the layers of the encoder
    assert ((encoder >= 0).all(axis=(1, 2)) == given["attention_mask"].bool().flatten().numpy()).all()
    assert (encoder[given["attention_mask"].flatten().numpy() == 0] < 0).all()


def test_every_nllb_expert_runs(tmp_path: Path) -> None:
    case = NLLB[0]
    given = tiny.inputs(case.family, saved(case, tmp_path), batch=4, tokens=16)
    model = cached(case, tmp_path)
    with model.hotset.trace() as recorder:
        tiny.logits(model, given)
    assert len(np.unique(recorder.finish().experts[recorder.finish().experts >= 0])) == 8


def test_a_switch_token_that_finds_no_room_is_routed_nowhere(tmp_path: Path) -> None:
    case = Case("switch_transformers", {"expert_capacity": 1}, SEQ2SEQ)
    stock = saved(case, tmp_path)
    model = cached(case, tmp_path)
    seen: list[tuple[bool, bool]] = []
    for module in model.modules():
        if type(module).__name__ == "SwitchTransformersExperts":
            module.register_forward_hook(
                lambda _, given, out: seen.extend(zip(~given[1].any(-1).any(-1), (out == 0).all(-1), strict=True))
            )
    given = tiny.inputs(case.family, stock)
    torch.testing.assert_close(tiny.logits(model, given), tiny.logits(stock, given), atol=1e-5, rtol=1e-5)
    assert all(bool(dropped) == bool(zero) for dropped, zero in seen)


def test_jetmoe_keeps_its_attention_experts_resident(tmp_path: Path) -> None:
    saved(Case("jetmoe"), tmp_path)
    names = {name for name, _ in cached(Case("jetmoe"), tmp_path).named_parameters()}
    assert any("self_attention.experts.input_linear" in name for name in names)
    assert not any("mlp.input_linear" in name for name in names)


def doge() -> nn.Module:
    with tiny.quiet():
        config = transformers.DogeConfig(
            vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, is_moe=True, num_experts=16, num_experts_per_tok=2,
        )  # fmt: skip
        return transformers.DogeForCausalLM(config)


def vitpose() -> nn.Module:
    with tiny.quiet():
        config = transformers.VitPoseBackboneConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_experts=2, part_features=4,
        )  # fmt: skip
        return transformers.VitPoseBackbone(config)


@pytest.mark.parametrize(("make", "kind"), [(doge, "DogeCDMoE"), (vitpose, "VitPoseBackboneMoeMLP")])
def test_experts_of_another_kind_are_refused_by_name(make: Any, kind: str) -> None:
    with pytest.raises(ModelError, match=f"cannot run {kind}") as refused:
        find_moe_layers(make())
    assert REASONS[kind] in str(refused.value)


def test_every_class_out_of_scope_has_a_reason() -> None:
    assert OUT_OF_SCOPE.keys() <= REASONS.keys()
    assert not REASONS.keys() & adapters().keys()


def test_a_doge_checkpoint_is_refused_when_loaded(tmp_path: Path) -> None:
    with tiny.quiet():
        doge().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="DogeCDMoE"):
        hotset.load(tmp_path, memory="50%")


def test_a_model_without_experts_is_called_dense() -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(ModelError, match="dense"):
        find_moe_layers(transformers.LlamaForCausalLM(config))
