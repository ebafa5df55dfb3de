"""What statistics, policy and shadows cost per decode step of the reference model, whose steps are as short as any.

Parts: the engine's call per event with and without statistics, the monitor's call per pass, and the text of a live
model with and without both. All variants alternate in short bursts in random order; what counts are paired differences
of processor time, which does not depend on who else runs. Steps are given in wall time, too.
"""

from __future__ import annotations

import argparse
import time
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from hotset import reference
from hotset.cache import Controller, SlotPlan, kernel
from hotset.cache.monitor import CacheMonitor
from hotset.policies import Policy, base, parse
from hotset.policies.base import EventView, compiled
from hotset.trace import Phase

from common import publish

ROUNDS, PASSES = 500, 32
ALTERNATIONS, STEPS = 60, 32
POLICIES = ("lru", "blend")
WORKLOAD = "it"
TARGET_SHARE = 0.01

serve: Callable[..., int]  # bound when a kernel is made
Experts = npt.NDArray[np.int32]
Burst = list[list[tuple[int, Experts]]]  # passes of events


def serve_untracked(
    table: Any, state: Any, layer: int, experts: Any, counts: Any, tokens: int, phase: int, admit: int
) -> int:
    """The engine's way in without the statistics: kernel.serve_one less `track` and the arrays it takes."""
    event = EventView(layer, experts, counts, tokens, phase, table.clock[0] + 1)
    missing: int = serve(table, state, event, admit)  # noqa: F821
    return missing


def untracked_kernel(policy: type[Policy]) -> Callable[..., int]:
    """The kernel of a policy compiled anew, with an entry that keeps no statistics."""
    space = vars(kernel) | {"observe": policy.observe, "score": policy.score}
    for template in kernel._TEMPLATES:
        if template not in kernel._ENTRIES:
            space[template.__name__] = compiled(types.FunctionType(template.__code__, space, template.__name__))
    entry = types.FunctionType(serve_untracked.__code__, space, f"serve_untracked_{policy.name}")
    made: Callable[..., int] = njit(**base._HOT)(entry)
    return made


def untracked_route(controller: Controller) -> Callable[..., int]:
    """Controller.route without statistics, as a method of this controller."""
    entry = untracked_kernel(type(controller.policy))

    def route(
        self: Controller,
        layer: int,
        experts: Experts,
        counts: Experts | None = None,
        tokens: int = 1,
        phase: Phase = Phase.DECODE,
    ) -> int:
        if not self.policy.can_serve(self.state, len(experts)):
            raise ValueError(self.policy.name)
        if counts is None:
            counts = self._ones[: len(experts)]
        admit = self.policy.admission if phase == Phase.DECODE else self.prefill
        return entry(self.table, self.state, layer, experts, counts, tokens, int(phase), int(admit))

    return types.MethodType(route, controller)


def bursts() -> Iterator[Burst]:
    """The decode passes of a workload over and over, some at a time, as the engine would ask for them."""
    trace = reference.trace(WORKLOAD)
    events = trace.take(trace.phase == Phase.DECODE).events()
    layers = events.shape.layers
    asked = [
        (int(layer), events.expert[a:b].copy())
        for layer, a, b in zip(events.layer, events.start[:-1], events.start[1:], strict=True)
    ]
    passes = [asked[at : at + layers] for at in range(0, len(asked), layers)]
    while True:
        for at in range(0, len(passes) - PASSES + 1, PASSES):
            yield passes[at : at + PASSES]


def fresh(policy: str, share: float) -> Controller:
    """A cache of the reference model."""
    shape = reference.trace(WORKLOAD).shape
    return Controller(SlotPlan(shape, int(share * shape.total_experts)), parse(policy))


def route_time(controller: Controller, route: Callable[..., int], burst: Burst) -> float:
    """Microseconds per event of one burst."""
    controller.usage.log[:2] = 0, 2  # as if it was read in between: a full log would be cheaper
    began = time.thread_time()
    for run in burst:
        for layer, experts in run:
            route(layer, experts)
    return 1e6 * (time.thread_time() - began) / sum(map(len, burst))


def routes(random: np.random.Generator) -> dict[str, Any]:
    """Microseconds per event: both policies, with and without statistics, a quarter resident and all."""
    work: dict[str, Callable[[Burst], float]] = {}
    caches: dict[str, Controller] = {}
    for where, share in (("25%", 0.25), ("all hits", 1.0)):
        for policy in POLICIES:
            for kind in ("tracked", "untracked"):
                cache = caches[f"{where} {policy} {kind}"] = fresh(policy, share)
                route = cache.route if kind == "tracked" else untracked_route(cache)
                work[f"{where} {policy} {kind}"] = partial(route_time, cache, route)
    times = alternate(work, bursts(), ROUNDS, random)
    figures: dict[str, Any] = {}
    for where in ("25%", "all hits"):
        for policy in POLICIES:
            a, b = (f"{where} {policy} {kind}" for kind in ("tracked", "untracked"))
            if (caches[a].table.counters != caches[b].table.counters).any():
                raise AssertionError("the two variants did not do the same")
            figures[f"{where}, {policy}"] = {
                "tracked_us": spread(times[a]),
                "untracked_us": spread(times[b]),
                "statistics_us": spread(times[a] - times[b]),
            }
        both = times[f"{where} blend untracked"] - times[f"{where} lru untracked"]
        figures[f"{where}, blend over lru"] = {"policy_us": spread(both)}
    return figures


def monitor_time(controller: Controller, monitor: CacheMonitor, burst: Burst) -> float:
    """Microseconds per pass that the monitor takes after it, its looks at the log spread over all passes."""
    total = 0.0
    for run in burst:
        for layer, experts in run:
            controller.route(layer, experts)
        began = time.thread_time()
        if monitor.is_due:
            monitor.poll()
        total += time.thread_time() - began
    return 1e6 * total / len(burst)


def monitors(random: np.random.Generator) -> dict[str, Any]:
    """Microseconds per pass of the monitor: alone, with lru in the shadow, and with two more of a warm-pin trial."""
    kinds = {
        "no shadow (lru is live)": ("lru", 0),
        "lru shadow": ("blend", 0),
        "lru shadow, warm-pin trial": ("blend", 64),
    }
    work: dict[str, Callable[[Burst], float]] = {}
    made: dict[str, CacheMonitor] = {}
    for name, (policy, tokens) in kinds.items():
        cache = fresh(policy, 0.25)
        boss = made[name] = CacheMonitor(cache, lambda _: None, warm_pin_tokens=tokens)
        settle(cache, boss)
        work[name] = partial(monitor_time, cache, boss)
    times = alternate(work, bursts(), ROUNDS, random)
    pin = made["lru shadow, warm-pin trial"].warm_pin
    if pin is None or pin.state != "trying":
        raise AssertionError("the trial did not last")
    return {name: spread(found) for name, found in times.items()}


def settle(cache: Controller, monitor: CacheMonitor) -> None:
    """Run until a trial begins, if there is to be one, and let it never end."""
    source = bursts()
    for _ in range(8):
        if monitor.warm_pin is None or monitor.warm_pin.state != "trying":
            monitor_time(cache, monitor, next(source))
    if monitor.warm_pin is not None:
        monitor.warm_pin.tokens = 1 << 60


class Times:
    """When each token came, as generate tells, by the clock and in processor time of all threads."""

    def __init__(self) -> None:
        self.at_s: list[tuple[float, float]] = []

    def put(self, _: Any) -> None:
        """Note a token; the first call is the prompt."""
        self.at_s.append((time.perf_counter(), time.process_time()))

    def end(self) -> None:
        """Nothing is left to do."""

    def step_ms(self) -> npt.NDArray[np.float64]:
        """The mean time of a decode step: wall and processor."""
        return 1e3 * (np.array(self.at_s[-1]) - self.at_s[1]) / (len(self.at_s) - 2)


def end_to_end(memory: str, random: np.random.Generator) -> dict[str, Any]:
    """The decode step of a live model as it is, without the monitor, and without any statistics."""
    import torch

    import hotset

    model = hotset.load(str(reference.path()), memory=memory, device="cpu")
    engine = model.hotset.engine
    ids = _prompt()
    boss, route = engine.monitor, untracked_route(engine.controller)

    def answer(monitor: CacheMonitor | None, tracked: bool) -> npt.NDArray[np.float64]:
        engine.monitor = monitor
        engine.controller.__dict__.pop("route", None)
        if not tracked:
            engine.controller.route = route
        times = Times()
        new = {"max_new_tokens": STEPS + 1, "min_new_tokens": STEPS + 1}
        model.generate(torch.tensor([ids]), streamer=times, do_sample=False, pad_token_id=0, **new)
        return times.step_ms()

    kinds: dict[str, Callable[[Any], Any]] = {
        "as it is": lambda _: answer(boss, True),
        "without supervisor": lambda _: answer(None, True),
        "without supervisor and statistics": lambda _: answer(None, False),
    }
    model.hotset.reset_stats()
    times = alternate(kinds, iter(lambda: None, 1), ALTERNATIONS, random)
    hit_rate = model.hotset.stats()["decode"]["hit_rate"]
    model.hotset.close()
    plain = times["as it is"]
    figures: dict[str, Any] = {"decode_hit_rate": hit_rate, "tokens_per_s": 1e3 / float(np.median(plain[:, 0]))}
    for column, clock in enumerate(("wall_ms", "cpu_ms")):
        figures[f"step_{clock}"] = {name: spread(found[:, column]) for name, found in times.items()}
        others = {name: found for name, found in times.items() if found is not plain}
        figures[f"more_than_{clock}"] = {name: spread((plain - found)[:, column]) for name, found in others.items()}
    return figures


def _prompt() -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(reference.path() / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(reference.workload(WORKLOAD).prompts[1].text).ids
    return ids


def alternate(
    work: dict[str, Callable[[Any], Any]], source: Iterator[Any], rounds: int, random: np.random.Generator
) -> dict[str, npt.NDArray[np.float64]]:
    """Let all variants do the same in every round, in random order; the first rounds only warm up."""
    times: dict[str, list[Any]] = {name: [] for name in work}
    names = list(work)
    for number in range(-3, rounds):
        item = next(source)
        for place in random.permutation(len(names)):
            found = work[names[place]](item)
            if number >= 0:
                times[names[place]].append(found)
    return {name: np.array(found) for name, found in times.items()}


def spread(values: npt.NDArray[np.float64]) -> dict[str, float]:
    """The median and the quartiles."""
    low, middle, high = np.percentile(values, (25, 50, 75)).tolist()
    return {"median": middle, "q1": low, "q3": high}


def shares(route: dict[str, Any], monitor: dict[str, Any], live: dict[str, Any]) -> dict[str, Any]:
    """What each part takes of the CPU time of a decode step as it was measured live."""
    layers = reference.trace(WORKLOAD).shape.layers
    found: dict[str, Any] = {}
    for where, row in live.items():
        step_us = 1e3 * row["step_cpu_ms"]["as it is"]["median"]
        statistics = layers * route[f"{where}, blend"]["statistics_us"]["median"]
        policy = layers * route[f"{where}, blend over lru"]["policy_us"]["median"]
        call = layers * route[f"{where}, blend"]["tracked_us"]["median"]
        watching = {name: times["median"] / step_us for name, times in monitor.items()}
        found[where] = {
            "step_cpu_us": step_us,
            "statistics_us": statistics,
            "statistics": statistics / step_us,
            "statistics_below_target": bool(statistics < TARGET_SHARE * step_us),
            "blend_over_lru": policy / step_us,
            "whole_call_of_blend": call / step_us,
            "supervisor": watching,
        }
    return found


def _show(title: str, figures: dict[str, Any]) -> None:
    print(title)
    for name, row in figures.items():
        print("  ", name, row, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and publish."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    random = np.random.default_rng(0)
    route, monitor = routes(random), monitors(random)
    _show("route", route)
    _show("supervisor", monitor)
    total = reference.trace(WORKLOAD).shape.total_experts
    live = {where: end_to_end(memory, random) for where, memory in (("25%", "25%"), ("all hits", f"{total - 1} slots"))}
    _show("live", live)
    share = shares(route, monitor, live)
    _show("share of a step", share)
    publish(
        "tracking_overhead",
        {
            "model": f"reference model, 8 layers x 64 experts, top 8; decode passes of {WORKLOAD}; one thread",
            "target": f"statistics below {TARGET_SHARE:.0%} of a decode step",
            "rounds": {"bursts": ROUNDS, "passes_per_burst": PASSES, "texts": ALTERNATIONS, "steps_per_text": STEPS},
            "route_us_per_event": route,
            "supervisor_us_per_pass": monitor,
            "live": live,
            "share_of_a_step": share,
        },
    )


if __name__ == "__main__":
    main()
