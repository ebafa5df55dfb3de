"""`make test` compiles what most tests need before it starts workers, each kernel once and on all cores.

Numba keeps machine code on disk, but workers that start side by side would each compile most of it. What is on disk
already is only loaded; a failure here is left to the tests to report.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

SLOW = ("best", "nextuse", "eam", "blend")
"""What takes longest: it is begun first, in this order."""
WARMED = ("blend",)
"""Policies that tests of more than one file begin with a profile."""


def compile_policy(name: str) -> None:
    """Serve, replay, and, where several tests need it, learn from a profile and look for a victim."""
    import numpy as np

    from hotset.cache import Controller, SlotPlan
    from hotset.policies import parse
    from hotset.trace.synth import SynthConfig, synthesise

    trace = synthesise(SynthConfig(layers=2, experts=8, top_k=2, requests=2, prompt_tokens=4, new_tokens=4))
    policy, plan = parse(name), SlotPlan(trace.shape, 4)
    Controller(plan, policy).replay(trace.events())
    if policy.offline:
        return
    cache, heat = Controller(plan, policy), np.random.default_rng(0).random((2, 8))
    if name in WARMED:
        cache.seed_from_rates(heat, 8)
        cache.victim(0)
    cache.preload(heat)
    for event in trace:
        cache.serve(event)


def compile_forecast(name: str) -> None:
    """Judge it, prefetch by it in the simulator, and ask it event by event as an engine does."""
    import numpy as np

    from hotset import reference
    from hotset.cache import Controller, SlotPlan
    from hotset.forecasts import parse
    from hotset.forecasts._kernel import steps_of
    from hotset.policies import parse as parse_policy
    from hotset.prefetch import plan_prefetch
    from hotset.sim.forecasting import evaluate
    from hotset.sim.link import Link
    from hotset.sim.prefetch import simulate_prefetch

    trace = reference.trace("it").select([0, 1])
    evaluate(trace, [name])
    cache = Controller(SlotPlan(trace.shape, trace.shape.total_experts // 4), parse_policy("lru"))
    simulate_prefetch(trace, cache, Link(1e9, 1e-3), name, plan_prefetch("cpu", trace.shape))
    forecast = parse(name)
    state, steps, out = forecast.start(trace.shape), steps_of(type(forecast)), np.zeros(trace.shape.experts)
    experts, counts = np.arange(2, dtype=np.int32), np.ones(2, np.int32)
    seen = (0, experts, counts, 1, 1, 0, 5, np.full((1, 1), -1, np.int16))
    steps.observe(state, *seen)
    slots, picked = np.full(trace.shape.experts, -1, np.int32), np.zeros(4, np.int64)
    steps.pick(state, *seen, 1, 1, slots, 0.5, out, picked)


def compile_part(kind: str) -> None:
    """Compile what replays have in common."""
    from hotset import ahead

    ahead.compile_part(ahead.Part(kind))


_KINDS = {"policy": compile_policy, "forecast": compile_forecast, "part": compile_part}


def compile_one(job: tuple[str, str]) -> str:
    """Compile for one policy, forecast or part; what went wrong, if anything did."""
    kind, name = job
    try:
        _KINDS[kind](name)
    except Exception as error:
        return f"{kind} {name}: {error!r}\n"
    return ""


def main() -> None:
    """Compile everything, a policy or a forecast at a time in each process."""
    from hotset import forecasts, policies

    jobs = [("policy", name) for name in policies.names()] + [("forecast", name) for name in forecasts.names()]
    jobs += [("part", kind) for kind in ("curve", "walk", "trial", "shadow")]
    jobs.sort(key=lambda job: SLOW.index(job[1]) if job[1] in SLOW else len(SLOW))
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1), get_context("spawn")) as pool:
        sys.stderr.writelines(pool.map(compile_one, jobs))


if __name__ == "__main__":
    main()
