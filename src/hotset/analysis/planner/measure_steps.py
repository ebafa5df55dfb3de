"""What the engine and transformers take beside weights: steps of the small model that ships with hotset."""

from __future__ import annotations

import time
from statistics import median
from typing import Any, NamedTuple

import torch

from hotset.analysis.planner.measure_experts import EVENT_EXPERTS, measure_expert
from hotset.analysis.planner.rates import Matrices
from hotset.generation.text_model import load_tokenizer
from hotset.models.load import load
from hotset.reference import path as reference_path
from hotset.reference import workload

MATRICES: Matrices = ((64, 256), (256, 32))
"""Of an expert of the reference model."""
_PROMPTS, _WARM_TOKENS = 2, 12
_WORKLOAD = "it"
_MOST_S, _LEAST_TOKENS = 5.0, 4


class Steps(NamedTuple):
    """The decode steps of one budget: medians of their times, for other work on the machine only ever adds."""

    layer_s: float  # of a step beside its events, per layer
    event_s: float
    misses: float  # of an event


class StepRates(NamedTuple):
    """What each layer, event and miss takes beside bytes."""

    layer_s: float
    event_s: float
    partial_s: float
    miss_s: float


@torch.inference_mode()
def measure_steps(memory: str, tokens: int, **options: Any) -> Steps:
    """Answer some prompts with the reference model under a budget."""
    place = str(reference_path())
    tokenizer, model = load_tokenizer(place), load(place, memory=memory, **options)
    layers, missed, steps = len(model.hotset.moe_layers), 0, 0
    times: list[tuple[float, float]] = []  # of each step: beside its events, and in them
    try:
        for prompt in workload(_WORKLOAD).prompts[:_PROMPTS]:
            device = next(model.parameters()).device
            ids = torch.tensor([tokenizer(prompt.text)["input_ids"]], device=device)
            out, _ = _decode(model, model(ids, use_cache=True, logits_to_keep=1), _WARM_TOKENS)
            model.hotset.reset_stats()
            found = _decode(model, out, tokens)[1]
            missed += model.hotset.stats()["decode"]["misses"]
            times, steps = times + found, steps + len(found)
    finally:
        model.hotset.close()
    rest_s, events_s = (median(each) for each in zip(*times, strict=True))
    return Steps(rest_s / layers, events_s / layers, missed / (steps * layers))


def _decode(model: Any, out: Any, tokens: int) -> tuple[Any, list[tuple[float, float]]]:
    """Go on for some tokens; returns the last output, and the time of each step beside its events and in them.

    On a machine that is too busy it ends earlier.
    """
    times: list[tuple[float, float]] = []
    until_s = time.perf_counter() + _MOST_S
    while len(times) < tokens and (len(times) < _LEAST_TOKENS or time.perf_counter() < until_s):
        began, before_s = time.perf_counter(), model.hotset.engine.stats.clock.experts_s
        ids = out.logits[:, -1:].argmax(-1)
        out = model(ids, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
        model.hotset.engine.sync_clock()
        events_s = model.hotset.engine.stats.clock.experts_s - before_s
        times.append((time.perf_counter() - began - events_s, events_s))
    return out, times


def step_rates(tokens: int, seconds: float) -> StepRates:
    """Steps on this CPU with next to all experts resident, with half and with a quarter: what is fixed, and of what."""
    total = 512
    full, half, quarter = (
        measure_steps(memory, tokens, device="cpu") for memory in (f"{total - 1} slots", "50%", "20%")
    )
    own_s = EVENT_EXPERTS * measure_expert("bfloat16", MATRICES, seconds).one_s
    miss_s = max(quarter.event_s - half.event_s, 0.0) / max(quarter.misses - half.misses, 1e-9)
    partial_s = half.event_s - full.event_s - (half.misses - full.misses) * miss_s
    return StepRates(
        layer_s=sorted((full.layer_s, half.layer_s, quarter.layer_s))[1],
        event_s=max(full.event_s - full.misses * miss_s - own_s, 0.0),
        partial_s=max(partial_s, 0.0),
        miss_s=miss_s,
    )
