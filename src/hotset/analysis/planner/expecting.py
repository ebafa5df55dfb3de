"""What to expect of a model that was just loaded: a line from kept figures, without measuring or replaying anything."""

from __future__ import annotations

from typing import Any

import numpy as np

from hotset.analysis.planner import calibration
from hotset.analysis.planner.hits import HitCurve
from hotset.analysis.planner.model import PlannedModel, Precision
from hotset.analysis.planner.times import TokenTimes
from hotset.cache.plan import SlotPlan
from hotset.shape import format_size

MORE_BYTES = 2 << 30
_SPREAD = 0.2
"""Either side of what is expected: the calibration's, and that of a workload that is not known."""


def memory_line(model: Any) -> str | None:
    """What `--memory auto` came to, and why; what that will do, where this machine and this shape are known.

    Nothing where every expert fits: that is said already.
    """
    engine = model.hotset.engine
    plan: SlotPlan = engine.controller.plan
    if engine.offload is None:
        return None
    taken = (plan.cached + plan.staging + plan.prefetch_rows) * (plan.shape.expert_bytes or 0)
    words = (
        f"memory auto: {format_size(taken)} for experts as they are stored, "
        f"{100 * plan.cached / plan.shape.total_experts:.0f} % resident: all that is free beside the rest of the model"
    )
    try:
        return words + (_expected(model, plan) if engine.device.type == "cpu" else "")
    except Exception:  # an experts' layout of another kind: what to expect is a courtesy, and no reason to fail
        return words


def expected_speed(model: PlannedModel, experts_bytes: int) -> dict[str, float] | None:
    """Tokens per second on this CPU with so much memory for experts; None where machine or shape were not measured."""
    kept = calibration.load()
    curve = None if kept is None else kept.curve(model.shape)
    if kept is None or curve is None:
        return None
    own = model.precisions()[0]
    slots = min(experts_bytes // own.expert_bytes, model.shape.total_experts)
    token_s = _token_s(TokenTimes(model, own, kept.rates()), curve, slots)
    return {"low": (1 - _SPREAD) / token_s, "expected": 1 / token_s, "high": (1 + _SPREAD) / token_s}


def _expected(model: Any, plan: SlotPlan) -> str:
    kept = calibration.load()
    curve = None if kept is None else kept.curve(plan.shape)
    if kept is None or curve is None or not plan.shape.expert_bytes:
        return "; hotset doctor MODEL --measure, once, would let this line say what to expect"
    times = TokenTimes(*planned(model, plan), kept.rates())
    now_s = _token_s(times, curve, plan.cached)
    more = plan.cached + MORE_BYTES // plan.shape.expert_bytes
    gain = now_s / _token_s(times, curve, min(more, plan.shape.total_experts)) - 1
    low, high = (1 - _SPREAD) / now_s, (1 + _SPREAD) / now_s
    brings = "" if plan.cached >= plan.shape.total_experts else (
        f"; another {format_size(MORE_BYTES)} would bring {100 * gain:.0f} %"
    )  # fmt: skip
    return f"; expect {low:.0f} to {high:.0f} tokens per second{brings}"


def _token_s(times: TokenTimes, curve: HitCurve, slots: int) -> float:
    return float(np.interp(slots, curve.slots, times.token_s(curve)))


def planned(model: Any, plan: SlotPlan) -> tuple[PlannedModel, Precision]:
    """The sizes of a loaded model, as far as a token's time depends on them."""
    from hotset.analysis.planner.inspecting import own_precision, stored_matrices

    handle, shape = model.hotset, plan.shape
    layout = handle.engine.offload.catalog.layers[0].layout
    dense = sum(each.numel() * each.element_size() for each in model.parameters() if each.device.type != "meta")
    layers = int(getattr(model.config.get_text_config(), "num_hidden_layers", shape.layers) or shape.layers)
    found = PlannedModel(
        name=handle.model_name, layers=shape.layers, experts=shape.experts, top_k=shape.top_k,
        matrices=stored_matrices(layout, handle.moe_layers[0].spec), all_layers=layers, dense_bytes=dense,
        read_bytes=dense, context_bytes=0, work_bytes=0,
    )  # fmt: skip
    return found, Precision(own_precision(layout), shape.expert_bytes or 0)
