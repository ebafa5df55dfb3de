"""A tiny model driven by the device, or without a GPU by Triton's interpreter: then a step is run again, not replayed.

Import it once torch, transformers and Triton are known to be there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from hotset import policies
from hotset.cache.controller import Controller
from hotset.cache.plan import Scope, SlotPlan
from hotset.engine.arena import poison
from hotset.engine.build import gpu_engine
from hotset.engine.device import capture, gather
from hotset.engine.kernels import tuning
from hotset.models.budget import shape_of
from hotset.models.connect import connect_engine
from hotset.models.decode_graph import DecodeGraphs
from hotset.models.deferred import DeferredExperts, load_without_experts
from hotset.models.quantised import own_reading
from hotset.models.routers import Routers

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
WIDTH, INNER = (32, 16) if CUDA else (16, 8)  # the interpreter runs one program after another
LATE = not CUDA and isinstance(gather.gather, triton.JITFunction)
"""Kernels were defined before the interpreter was asked for: nothing here can run."""


class Latest(dict[str, Any]):
    """The outputs of the last run."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Again:
    """Where there are no graphs, a step is run again."""

    def __init__(self, step: capture.Capture) -> None:
        self.step, self.outputs = step, Latest()

    def replay(self) -> None:
        with torch.no_grad():
            self.outputs.update(self.step.run().items())


def go_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have steps run again where there is no GPU, by as few programs as possible."""
    if CUDA:
        return

    def recorded(step: capture.Capture, _: Any) -> tuple[Any, Any]:
        again = Again(step)
        return again, again.outputs

    monkeypatch.setattr(capture, "recorded", recorded)
    monkeypatch.setattr(gather, "DEMAND", gather.DEMAND._replace(programs=2))  # the interpreter is slow to start one
    monkeypatch.setattr(tuning, "_LISTS", {key: [tuning.Choice(64, 64, 1)] for key in tuning._LISTS})  # whole matrices


def make(folder: Path, layers: int, experts: int, top_k: int, *, width: int = WIDTH, inner: int = INNER) -> Path:
    """A checkpoint so small that the interpreter gets through it."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=width, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_experts=experts, num_experts_per_tok=top_k,
        moe_intermediate_size=inner, initializer_range=0.5, eos_token_id=None,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def stock_of(folder: Path) -> Any:
    """The model as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).eval()


def load(
    folder: Path,
    slots: int,
    policy: str,
    staging: int,
    *,
    ahead: int = 0,
    install: bool = True,
    demanded: bool = False,
) -> Any:
    """The model with its experts under a budget, all memory poisoned before anything is read."""
    from transformers import AutoModelForCausalLM

    deferred = DeferredExperts(keep=lambda *_: False)
    with load_without_experts(deferred):
        own = own_reading(str(folder), {})
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **own).to(DEVICE)
    assert deferred.moe_layers is not None
    assert deferred.catalog is not None
    shape = shape_of(deferred.moe_layers, deferred.catalog)
    host = SlotPlan(shape, shape.total_experts)
    controller = Controller(SlotPlan(shape, slots, Scope.LAYER, staging, ahead), policies.parse(policy))
    specs = [moe_layer.spec for moe_layer in deferred.moe_layers]
    routers = Routers.of(model, deferred.moe_layers) if ahead else None
    predict = None if routers is None else routers.scores
    engine = gpu_engine(
        controller, deferred.catalog, specs, DEVICE, host, policies.parse("lru"),
        by_device=True, pinned=not CUDA, predict=predict,
    )  # fmt: skip
    decode, offload = engine.device_decode, engine.offload
    assert decode is not None
    assert offload is not None
    assert offload.tier is not None
    poison(offload.arena)
    poison(offload.tier.arena)
    handle = connect_engine(model, deferred.moe_layers, engine)
    assert decode.steps.can_prefetch == (ahead > 1)
    if install:
        decode.filler.start()
        assert decode.filler.wait(60)
        caches = handle.static_caches
        model.graphs = DecodeGraphs(model, decode, handle.tracker, caches, warn=handle.warn, demanded=demanded)
        handle.patches.add(model.graphs.install())
    return model


def greedy(model: Any, tokens: int, ids: Any, **options: Any) -> list[list[int]]:
    """An answer of so many tokens."""
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "min_new_tokens": tokens}
    text: list[list[int]] = model.generate(ids, **given, do_sample=False, pad_token_id=0, **options).tolist()
    return text
