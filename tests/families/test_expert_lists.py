"""Experts that are a plain list of modules in a model's own code: served without an adapter, or refused in a line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from arctic.configuration_arctic import ArcticConfig
from arctic.modeling_arctic import ArcticForCausalLM
from torch import nn
from transformers import AutoModelForCausalLM

import hotset
from hotset.errors import ModelError
from hotset.models.expert_lists import moe_layer_of
from hotset.models.find_layers import find_moe_layers
from hotset.models.packing import pack

CODE = Path(__file__).parent / "arctic"
PROMPT = torch.arange(3, 40)[None] * 5 % 256


def arctic(**changes: Any) -> Any:
    torch.manual_seed(0)
    with tiny.quiet():
        return ArcticForCausalLM(ArcticConfig(**changes)).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that brings its code along, as the one on the hub does."""
    target = tmp_path_factory.mktemp("arctic") / "arctic"
    with tiny.quiet():
        arctic().save_pretrained(target)
    for name in ("configuration_arctic.py", "modeling_arctic.py"):
        shutil.copy(CODE / name, target / name)
    config = json.loads((target / "config.json").read_text())
    classes = {
        "AutoConfig": "configuration_arctic.ArcticConfig", "AutoModelForCausalLM": "modeling_arctic.ArcticForCausalLM",
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config | {"auto_map": classes}))
    return target


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(PROMPT).logits
    return found


def answer_of(model: Any) -> list[int]:
    found: list[int] = model.generate(PROMPT, max_new_tokens=12, do_sample=False)[0].tolist()
    return found


def assert_as_stock(model: Any, stock: Any) -> None:
    torch.testing.assert_close(logits_of(model), logits_of(stock), rtol=1e-5, atol=1e-5)
    assert answer_of(model) == answer_of(stock)


@pytest.mark.parametrize("memory", ["4 slots", "50%", "100%"])
def test_a_model_with_its_own_code_is_loaded_as_stock_runs_it(folder: Path, memory: str) -> None:
    with tiny.quiet():
        stock = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
        model = hotset.load(folder, memory=memory, trust_remote_code=True, device="cpu")
    with model.hotset:
        assert_as_stock(model, stock)
        decode = model.hotset.stats()["decode"]
        assert decode["pass_tokens"] == 11
        assert decode["events"] == decode["tokens"] == 2 * 11
        assert decode["hits"] + decode["misses"] == 2 * 2 * 11


def test_code_of_its_own_runs_only_if_asked(folder: Path) -> None:
    with pytest.raises(ModelError, match="--trust-remote-code"):
        hotset.load(folder, memory="50%")


@pytest.mark.parametrize(
    "changes", [{}, {"moe_layer_frequency": 1}, {"parallel_attn_mlp_res": False}, {"hidden_act": "gelu"}]
)
def test_attach_and_detach(changes: dict[str, Any]) -> None:
    stock, model = arctic(**changes), arctic(**changes)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    forwards = {name for name, module in model.named_modules() if "forward" in vars(module)}
    hotset.attach(model, memory="4 slots")
    assert_as_stock(model, stock)
    hotset.detach(model)
    assert {name for name, module in model.named_modules() if "forward" in vars(module)} == forwards
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(logits_of(model), logits_of(stock))


def test_budgets_give_the_same_bits() -> None:
    few, many = arctic(), arctic()
    hotset.attach(few, memory="2 slots")
    hotset.attach(many, memory="100%")
    assert torch.equal(logits_of(few), logits_of(many))
    few.hotset.close()
    many.hotset.close()


def test_a_layer_is_one_event_and_is_recorded_by_token() -> None:
    model, stock = arctic(), arctic()
    chosen: list[torch.Tensor] = []
    for layer in stock.model.layers[1::2]:
        layer.block_sparse_moe.gate.register_forward_hook(lambda *given: chosen.append(given[2].topk(2).indices))
    logits_of(stock)
    hotset.attach(model, memory="4 slots")
    with model.hotset.trace() as recording:
        logits_of(model)
    trace = recording.finish()
    model.hotset.close()
    assert trace.experts.shape == (PROMPT.shape[1], 2, 2)
    for layer, right in enumerate(chosen):
        found = torch.from_numpy(trace.experts[:, layer].astype("int64"))
        assert torch.equal(found.sort().values, right.sort().values)


def test_gradients_go_through() -> None:
    stock, model = arctic(), arctic()
    hotset.attach(model, memory="4 slots")
    for each in (stock, model):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("experts" not in name)
        each(PROMPT).logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, stock.get_parameter(name).grad, rtol=1e-3, atol=1e-5)
    assert model.model.layers[1].block_sparse_moe.gate.weight.grad.any()
    model.hotset.close()


def test_a_list_is_packed_small(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "small", experts="int8", trust_remote_code=True)
    with tiny.quiet():
        stock = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
        model = hotset.load(tmp_path / "small", memory="50%", trust_remote_code=True, device="cpu")
    with model.hotset:
        assert (logits_of(model) - logits_of(stock)).abs().max() < 0.1 * logits_of(stock).abs().max()


class Plain(nn.Module):
    """A block around any list."""

    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        self.top_k = 1
        self.experts = nn.ModuleList(experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(expert(x[number::2]).sum() for number, expert in enumerate(self.experts))


class Mlp(nn.Module):
    """An expert of the usual kind: its matrices, biases, names and activation vary."""

    def __init__(self, width: int = 8, inner: int = 12, bias: bool = False, gated: bool = True) -> None:
        super().__init__()
        self.down = nn.Linear(inner, width, bias=bias)
        self.one = nn.Linear(width, inner, bias=bias)
        if gated:
            self.other = nn.Linear(width, inner, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = nn.functional.gelu(self.one(x))
        return self.down(self.other(x) * first if hasattr(self, "other") else first)


class Swapped(Mlp):
    """The other matrix is the gate."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.one(x) * torch.relu(self.other(x)) ** 2)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("kind", [Mlp, Swapped])
@pytest.mark.parametrize("bias", [False, True])
def test_roles_are_found_by_what_is_computed(kind: type[Mlp], bias: bool, square: bool) -> None:
    torch.manual_seed(3)
    block = Plain([kind(inner=8 if square else 12, bias=bias) for _ in range(3)])
    found = moe_layer_of("experts", block.experts, block)
    names = [row_range.parameter for row_range in found.parts[0].row_ranges(2)]
    order = ("one", "other") if kind is Mlp else ("other", "one")
    assert names == [f"experts.2.{key}.weight" for key in order]
    x, expert = torch.randn(4, 8), block.experts[1]
    weights = {
        part.name: torch.cat([block.get_parameter(r.parameter) for r in part.row_ranges(1)]) for part in found.parts
    }
    inner = nn.functional.linear(x, weights["up"], weights.get("up_bias"))
    out = nn.functional.linear(found.spec.activation(inner), weights["down"], weights.get("down_bias"))
    torch.testing.assert_close(out, expert(x))
    assert found.spec.looped  # no graph can hold the loop


def test_two_matrices_do() -> None:
    block = Plain([Mlp(gated=False) for _ in range(2)])
    assert moe_layer_of("experts", block.experts, block).parts[0].shape == (12, 8)


class Scaled(Mlp):
    """It multiplies by a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))


class Odd(Mlp):
    """It computes what is no expert's business."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x


@pytest.mark.parametrize(
    ("experts", "why"),
    [
        ([Mlp(), Mlp(inner=16)], "expert 1 is not like the first"),
        ([Mlp(), Swapped()], "expert 1 is not like the first"),
        ([Scaled(), Scaled()], "more than two or three linear maps"),
        ([nn.Linear(8, 8), nn.Linear(8, 8)], "more than two or three linear maps"),
        ([Odd(), Odd()], "computes something else"),
        ([nn.Sequential(Mlp()), nn.Sequential(Mlp())], "more than two or three linear maps"),
    ],
)
def test_irregular_lists_are_refused(experts: list[nn.Module], why: str) -> None:
    with pytest.raises(ModelError, match=why) as refused:
        find_moe_layers(Plain(experts))
    assert "\n" not in str(refused.value)


def test_lists_that_no_router_chooses_from_are_none() -> None:
    block = nn.Module()
    block.shared_experts = nn.ModuleList([Mlp(), Mlp()])
    block.layers = nn.ModuleList([Mlp(), Mlp()])
    with pytest.raises(ModelError, match="has no experts that hotset knows"):
        find_moe_layers(block)
