"""Prefetch over a modelled link: what of the stalls it saves, and how many bytes it wastes, by the rules of a plan.

Prefetched experts wait in rows of their own and never change the cache. So a replay without them gives all
misses, and this follows with the forecast, the plan and the link alone. docs/design.md states the model.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.cache.controller import Controller, Replayed
from hotset.checks import instance
from hotset.errors import HotsetError
from hotset.forecasts import MAX_DISTANCE, parse
from hotset.prefetch import Claim, Driver, PrefetchPlan, plan_prefetch
from hotset.prefetch.times import start_times
from hotset.prefetch.trial import TrialState, start_trial
from hotset.sim import _prefetch_loop as loop
from hotset.sim.forecasting import arrays_of, learn
from hotset.sim.link import Link
from hotset.trace import Trace
from hotset.trace.events import EventTable

AUTO, OFF, ORACLE = "auto", "off", "oracle"

Resident = npt.NDArray[np.bool_]
"""Which experts have a slot, of shape (layers, experts)."""


@dataclass(frozen=True)
class PrefetchResult:
    """What a replay with prefetch would have taken, in decode."""

    stall_s: float
    total_s: float
    in_time: int
    late: int
    wasted: int
    demand_bytes: float
    prefetched_bytes: float
    wasted_bytes: float
    steps_with: int  # decode steps that were prefetched for
    layers_switched_off: int  # at the end
    switched_off: bool  # whole steps, at the end


def chosen_forecast(trace: Trace, asked: str) -> tuple[str, bool]:
    """The forecast that was asked for, and whether a trial judges it: auto is the routers', where they are recorded."""
    if asked != AUTO:
        return asked, False
    return ("best" if trace.predictions is None else "gate"), True


def driver_for(trace: Trace, asked: str) -> Driver:
    """The driver that is modelled where none is named: the device, where a trace holds what it would predict by.

    That are the predictions of the routers as far ahead as it looks. All other forecasts are made by a host.
    """
    by_routers = asked == ORACLE or chosen_forecast(trace, asked)[0] == "gate"
    recorded = 0 if trace.predictions is None else trace.predictions.shape[2]
    enough = recorded >= plan_prefetch(Driver.DEVICE, trace.shape).layers_ahead
    return Driver.DEVICE if by_routers and enough else Driver.CPU


def check_driver(driver: Driver, trace: Trace, forecast: str) -> None:
    """Refuse what a driver cannot do."""
    if driver is not Driver.DEVICE or forecast in (OFF, ORACLE):
        return
    if parse(forecast).name != "gate":
        raise HotsetError(
            f"where the device drives, the routers predict: {forecast} is made by a host; use --driver cpu or host"
        )
    if trace.predictions is None:
        raise HotsetError("this trace holds no predictions of the routers: record it with --record-lookahead 2")


def simulate_prefetch(
    trace: Trace, controller: Controller, link: Link, forecast: str, plan: PrefetchPlan
) -> PrefetchResult:
    """Replay a trace and let a forecast prefetch by a plan; "off" and "oracle" are forecasts, too."""
    resident = controller.table.slot_of >= 0
    done = controller.replay(trace.events(), log=True)
    return follow_replay(trace, done, link, forecast, plan, resident=resident)


def follow_replay(
    trace: Trace,
    done: Replayed,
    link: Link,
    forecast: str,
    plan: PrefetchPlan,
    *,
    resident: Resident | None = None,
    training_trace: Trace | None = None,
) -> PrefetchResult:
    """The same for a replay that was done and logged, of a cache that began with `resident`; empty if not given.

    `training_trace` are earlier requests that the forecast has seen.
    """
    instance(plan, PrefetchPlan, "the plan of prefetch")
    layers, experts = trace.shape.layers, trace.shape.experts
    table = trace.events()
    _check_replay(done, table, resident)
    chosen = parse("previous" if forecast in (OFF, ORACLE) else forecast)
    check_driver(plan.driver, trace, forecast)
    events = arrays_of(trace, table, np.ones(len(table), np.bool_))
    events = events._replace(predicted=np.ascontiguousarray(events.predicted[..., : plan.max_ranks]))
    state = chosen.start(trace.shape)
    if training_trace is not None:
        learn(chosen, state, training_trace)
        events = events._replace(request=events.request + training_trace.requests)
    trial = start_trial(
        layers, auto=plan.trial and forecast != OFF, most=plan.rows_per_part, adaptive=plan.adaptive,
        by_layer=plan.layer_trial,
    )  # fmt: skip
    whole = [np.zeros(plan.rows, np.int64) for _ in range(3)]
    slots = loop.PrefetchSlots(np.full(plan.rows, loop.FREE), whole[0], np.zeros(plan.rows), *whole[1:])
    near = np.zeros((layers, experts), np.bool_) if resident is None else resident.copy()
    sums = np.zeros(loop.SUMS)
    loop.loop_of(type(chosen))(
        events, done.log, done.misses, near, state, trial, start_times(), slots, _link_state(link, trace),
        _rules(plan, forecast), np.zeros(experts), np.zeros(4), np.full((MAX_DISTANCE, experts), -1, np.int16), sums,
    )  # fmt: skip
    return _result(sums, trial, int(events.step[-1]) + 1)


def _rules(plan: PrefetchPlan, forecast: str) -> loop.Rules:
    """The plan as the loop reads it: all but two of its names are the plan's own."""
    own = {name: getattr(plan, name) for name in loop.Rules._fields if hasattr(plan, name)}
    mode = {OFF: loop.NO_PREFETCH, ORACLE: loop.TRUTH}.get(forecast, loop.FORECAST)
    return loop.Rules(mode=mode, waits_for_batch=plan.claim is Claim.BATCH, **own)


def _check_replay(done: Replayed, events: EventTable, resident: Resident | None) -> None:
    """Refuse the log of another replay, or of one that was not logged."""
    shape = events.shape
    misses, log = done.misses, done.log
    fits = len(misses) == len(events) and (misses >= 0).all() and int(misses.sum()) == len(log)
    if not fits or log.shape[1:] != (5,) or (log[:, [1, 4]] >= shape.experts).any():
        raise HotsetError("this replay is not of these events, or it was not logged")
    if (log[:, [0, 3]] >= shape.layers).any() or (log[:, :2] < 0).any():
        raise HotsetError("this replay is of a model with other layers")
    if resident is not None and resident.shape != (shape.layers, shape.experts):
        raise HotsetError(f"the residents are a grid of shape {(shape.layers, shape.experts)}, not {resident.shape}")


def _link_state(link: Link, trace: Trace) -> loop.LinkState:
    size = trace.shape.expert_bytes
    if size is None:
        raise HotsetError("a modelled link needs the size of an expert: pass --expert-bytes")
    layer_s = link.compute_s / trace.shape.layers
    return loop.LinkState(layer_s, layer_s * link.expert_share, link.bytes_per_s, link.latency_s, float(size))


def _result(sums: Any, trial: TrialState, next_step: int) -> PrefetchResult:
    """The sums stand in the order of the result's fields."""
    figures = {field.name: value for field, value in zip(fields(PrefetchResult), sums.tolist(), strict=False)}
    counts = {name: int(figures[name]) for name in ("in_time", "late", "wasted", "steps_with")}
    return PrefetchResult(
        **figures | counts,
        layers_switched_off=int((trial.off_until[:-1] > next_step).sum()),
        switched_off=bool(trial.off_until[-1] > next_step),
    )
