"""What hotset adds to one MoE layer when every expert is resident: its call against stock's, with tiny compute."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.utils import logging

import hotset
from hotset.engine.step import Step
from hotset.trace import Phase

from common import publish

LAYERS, EXPERTS, TOP_K, HIDDEN = 2, 64, 8, 64
ROUNDS, CALLS = 60, 40


def make(folder: str) -> None:
    """A model whose experts cost next to nothing."""
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": 16, "num_hidden_layers": LAYERS, "vocab_size": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    config = Qwen3MoeConfig(num_experts=EXPERTS, num_experts_per_tok=TOP_K, **sizes, **heads)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def microseconds(work: Callable[[], Any]) -> float:
    """The time of one call, from a short burst of them."""
    began = time.perf_counter()
    for _ in range(CALLS):
        work()
    return 1e6 * (time.perf_counter() - began) / CALLS


def _without_compute(engine: Any, call: Callable[[], Any]) -> Callable[[], Any]:
    """The same call with the products already done: what is left is hotset's own."""
    kernels = engine.offload.driver.kernels[0]
    real = kernels.experts

    def work() -> Any:
        kernels.experts = done
        try:
            return call()
        finally:
            kernels.experts = real

    with torch.no_grad():
        call()  # everything is resident from here on
        results = torch.zeros(TOP_K, HIDDEN)

    def done(*_: Any) -> torch.Tensor:
        return results

    return work


def main() -> None:
    """Measure side by side and publish."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        make(folder)
        stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model = hotset.load(folder, memory=f"{LAYERS * EXPERTS - 1} slots", dtype=torch.float32, policy="blend")
        engine = model.hotset.engine
        step = Step(1, 1, 1, Phase.DECODE, 0, engine.driver)
        hidden = torch.randn(1, HIDDEN)
        index = torch.randperm(EXPERTS)[:TOP_K].unsqueeze(0)
        weights = torch.full((1, TOP_K), 1 / TOP_K)
        experts = stock.model.layers[0].mlp.experts
        kinds: dict[str, Callable[[], Any]] = {"hotset": lambda: step.driver.serve(step, 0, hidden, index, weights)}
        for name in ("grouped_mm", "batched_mm"):
            kinds[name] = lambda f=ALL_EXPERTS_FUNCTIONS[name]: f(experts, hidden, index, weights)
        kinds["hotset without arithmetic"] = _without_compute(engine, kinds["hotset"])
        with torch.no_grad():
            times: dict[str, list[float]] = {name: [] for name in kinds}
            for _ in range(ROUNDS):
                for name, work in kinds.items():
                    times[name].append(microseconds(work))
        assert engine.controller.counters().as_dict()["misses"] <= TOP_K  # noqa: S101 - else it did not measure hits
        model.hotset.close()
    figures = {name: {"median_us": statistics.median(t), "best_us": min(t)} for name, t in times.items()}
    added = {name: figures["hotset"]["median_us"] - figures[name]["median_us"] for name in ("grouped_mm", "batched_mm")}
    print(figures, added)
    publish(
        "layer_overhead",
        {"shape": f"{EXPERTS} experts, top {TOP_K}, hidden {HIDDEN}", "times": figures, "added_us": added},
    )


if __name__ == "__main__":
    main()
