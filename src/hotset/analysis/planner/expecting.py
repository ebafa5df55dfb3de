"""What to expect of a model that was just loaded: a line from kept figures, without measuring or replaying anything."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from hotset.analysis.planner import calibration
from hotset.analysis.planner.hits import HitCurve
from hotset.analysis.planner.inspecting import own_precision, stored_matrices
from hotset.analysis.planner.intervals import interval
from hotset.analysis.planner.model import PlannedModel, Precision
from hotset.analysis.planner.times import TokenTimes
from hotset.analysis.planner.workload import GENERIC_SPREAD
from hotset.cache.plan import SlotPlan
from hotset.options.run import AUTO
from hotset.shape import format_size

MORE_BYTES = 2 << 30
_ALL_FIT = re.compile(r"all \d+ experts fit")


def auto_lines(model: Any, notes: Sequence[str], experts: str) -> list[str]:
    """The notes of a model that was loaded with `--memory auto`: what that chose, and why, is said in one of them.

    `experts` is the option that says in which numbers they are held.
    """
    return [*(line for line in notes if not _ALL_FIT.match(line)), auto_line(model, experts)]


def auto_line(model: Any, experts: str = AUTO) -> str:
    """What `auto` came to: memory, numbers, what to expect where that was measured, and what would do better."""
    engine = model.hotset.engine
    plan: SlotPlan = engine.controller.plan
    size, total = plan.shape.expert_bytes or 0, plan.shape.total_experts
    if engine.offload is None:
        own = str(model.dtype).removeprefix("torch.")
        words = f"memory auto: all {total} experts fit ({format_size(total * size)})"
        return f"{words}; {_numbers(own, experts)}; the model runs as transformers made it"
    own = own_precision(engine.offload.catalog.layers[0].layout)
    if plan.cached >= total:
        return f"memory auto: all {total} experts fit ({format_size(total * size)}); {_numbers(own, experts)}"
    taken = (plan.cached + plan.staging + plan.prefetch_rows) * size
    words = (
        f"memory auto: {format_size(taken)} for experts, {100 * plan.cached / total:.0f} % resident: all that is free "
        f"beside the rest of the model; {_numbers(own, experts)}"
    )
    try:
        return words + _more(model, plan, measured=engine.device.type == "cpu")
    except Exception:  # an experts' layout of another kind: what to expect is a courtesy, and no reason to fail
        return words


def _numbers(own: str, experts: str) -> str:
    return f"experts {experts}: {own}, " + ("as the checkpoint has them" if experts == AUTO else "as was asked for")


def expected_speed(model: PlannedModel, experts_bytes: int) -> dict[str, float] | None:
    """Tokens per second on this CPU with so much memory for experts; None where machine or shape were not measured."""
    kept = calibration.load()
    curve = None if kept is None else kept.curve(model.shape)
    if kept is None or curve is None:
        return None
    return _speed(TokenTimes(model, model.precisions()[0], kept.rates()), curve, experts_bytes)


def _speed(times: TokenTimes, curve: HitCurve, experts_bytes: int) -> dict[str, float]:
    """Tokens per second with so much memory for experts, for a workload that is not known."""
    slots = min(experts_bytes // times.precision.expert_bytes, curve.shape.total_experts)
    token_s = float(np.interp(slots, curve.slots, times.token_s(curve)))
    low_s, high_s = interval(times, curve, slots, token_s, GENERIC_SPREAD)
    return {"low": 1 / high_s, "expected": 1 / token_s, "high": 1 / low_s}


def _more(model: Any, plan: SlotPlan, *, measured: bool) -> str:
    """What to expect, what more memory would bring, and the best other precision: measured or by its size alone."""
    found, own = planned(model, plan)
    kept = calibration.load() if measured else None
    curve = None if kept is None else kept.curve(plan.shape)
    room = plan.cached * own.expert_bytes
    others = [each for each in found.precisions() if each.pack is not None]
    if kept is None or curve is None:
        whole = [each for each in others if room // each.expert_bytes >= plan.shape.total_experts]
        best = max(whole, key=lambda each: each.expert_bytes, default=None) or min(
            others, key=lambda each: each.expert_bytes, default=None
        )
        how = "; hotset doctor MODEL --measure, once, would let this line say what to expect" if measured else ""
        return _packed(best, room, plan) + how
    rates = kept.rates()
    speeds = {each: _speed(TokenTimes(found, each, rates), curve, room) for each in (own, *others)}
    more = _speed(TokenTimes(found, own, rates), curve, room + MORE_BYTES)["expected"]
    now = speeds[own]
    best = max(others, key=lambda each: speeds[each]["expected"], default=None)
    if best is not None and speeds[best]["expected"] <= now["expected"]:
        best = None
    much = "" if best is None else f", about {speeds[best]['expected']:.3g} tokens per second"
    return (
        f"; expect {now['low']:.3g} to {now['high']:.3g} tokens per second; another {format_size(MORE_BYTES)} would "
        f"bring {100 * (more / now['expected'] - 1):.0f} %{_packed(best, room, plan)}{much}"
    )


def _packed(best: Precision | None, room_bytes: int, plan: SlotPlan) -> str:
    """The other precision in a clause; it loses something, so that a person must ask for it."""
    if best is None:
        return ""
    share = min(room_bytes // best.expert_bytes / plan.shape.total_experts, 1.0)
    fits = "it would all fit" if share == 1 else f"{100 * share:.0f} % would be resident"
    return f"; packed as {best.name} (lossy) {fits}: hotset pack MODEL -o OUT --experts {best.pack}"


def planned(model: Any, plan: SlotPlan) -> tuple[PlannedModel, Precision]:
    """The sizes of a loaded model, as far as a token's time depends on them."""
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
