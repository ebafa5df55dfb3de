"""What a live cache compiles, ahead of the first answer: parts that are compiled side by side in processes, once.

Numba keeps machine code on disk for one version of Python, of Numba and of the sources, and one kind of processor: so
it cannot come with the package. What is there is loaded; the rest is compiled before a model answers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from hotset.compiling import NotKeptError, can_be_kept, only_kept

NEXT_ROUTER = "gate"
"""The forecast of `--prefetch auto`."""
_MODULE = "hotset.ahead"


class Part(NamedTuple):
    """Code that is compiled together: its kind, and the policy or forecast that it is for."""

    kind: str
    name: str = ""


def parts_of(policy: str, prefetch: str = "auto") -> list[Part]:
    """What a cache with this policy and this prefetch compiles, the longest first."""
    forecast = [] if prefetch == "off" else [Part("forecast", NEXT_ROUTER if prefetch == "auto" else prefetch)]
    return [Part("policy", policy), *forecast, *([Part("trial")] if forecast else []), Part("shadow")]


def is_compiled(parts: list[Part]) -> bool:
    """Whether all of it is on disk; it is loaded then."""
    try:
        with only_kept():
            for part in parts:
                compile_part(part)
    except NotKeptError:
        return False
    return True


def compile_parts(parts: list[Part], meanwhile: Callable[[], object] = lambda: None) -> Iterator[Part]:
    """Compile what is missing, in as many processes as there are cores, and yield each part that is done.

    `meanwhile` is called while the first of them run.
    """
    if can_be_kept() and len(parts) > 1:
        with _SideBySide(parts) as running:
            meanwhile()
            yield from running.done()
        for part in parts:
            compile_part(part)  # from disk
    else:
        meanwhile()
        for part in parts:
            compile_part(part)
            yield part


def compile_part(part: Part) -> None:
    """Run the code of a part on next to nothing, in this process."""
    _KINDS[part.kind](part.name)


class _SideBySide:
    """Processes of one part each; one that fails leaves its part to this process, which reports why."""

    def __init__(self, parts: list[Part]) -> None:
        self._waiting, self._running = list(parts), dict[Part, subprocess.Popen[bytes]]()
        self._fill()

    def __enter__(self) -> _SideBySide:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def done(self) -> Iterator[Part]:
        """Each part once its process has ended."""
        while self._waiting or self._running:
            self._fill()
            for part, process in list(self._running.items()):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.05)
                    del self._running[part]
                    yield part

    def _fill(self) -> None:
        while self._waiting and len(self._running) < _cores():
            part = self._waiting.pop(0)
            self._running[part] = _start(part)


def _start(part: Part) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(  # noqa: S603 - this interpreter and our own module
        [sys.executable, "-P", "-W", "ignore", "-m", _MODULE, part.kind, part.name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0 if os.name == "posix" else None,  # Ctrl-C at the terminal is not for it
        env={**os.environ, "PYTHONPATH": paths},
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _small() -> Any:
    from hotset.cache import SlotPlan
    from hotset.cache.plan import Scope
    from hotset.shape import ModelShape

    return SlotPlan(ModelShape(layers=1, experts=4, top_k=2), 3, Scope.LAYER, 1)


def _serve(policy: str, events: int = 1) -> Any:
    """A cache that has served some events as a live engine has it serve them."""
    from hotset.cache import Controller
    from hotset.policies import parse
    from hotset.trace import Phase

    cache, one = Controller(_small(), parse(policy)), np.ones(2, np.int32)
    for number in range(events):
        cache.route(0, np.array([number % 2, 3], np.int32), one, 1, Phase.DECODE, 0)
    return cache


def _policy(name: str) -> None:
    """Serve events, and credit them to a request."""
    from hotset.engine.requests import RequestLog

    log = RequestLog(_serve(name, 2))
    log.serve(1, 0, 0)
    log.all(0)


def _forecast(name: str) -> None:
    """Learn from an event, and pick what to prefetch."""
    from hotset.forecasts import parse
    from hotset.forecasts._kernel import steps_of
    from hotset.prefetch import MIN_PROBABILITY

    forecast, shape = parse(name), _small().shape
    state, steps = forecast.start(shape), steps_of(type(forecast))
    experts, ones = np.array([0, 3], np.int32), np.ones(2, np.int32)
    seen = (0, experts, ones, 1, 1, 0, -1, np.full((1, 1), -1, np.int16))
    steps.observe(state, *seen)
    slots, chances, picked = np.full((1, 4), -1, np.int32), np.zeros(shape.experts), np.zeros(4, np.int64)
    steps.pick(state, *seen, 0, 1, slots[0], MIN_PROBABILITY, chances, picked)


def _trial(_: str) -> None:
    """Decide whether prefetch pays."""
    from hotset.prefetch import PrefetchTrial

    trial = PrefetchTrial(1)
    trial.most(0, 0)
    trial.note_event(0, 0, 1e-3, 1, 0)
    trial.note_step(0, 1e-3)


def _shadow(_: str) -> None:
    """Replay in the shadow what a cache has served, its own events among them."""
    from hotset.cache import Controller
    from hotset.cache.shadow import shadow_of, take_log
    from hotset.cache.shadow_comparison import BASELINE
    from hotset.policies import parse

    live = Controller(_small(), parse(BASELINE))
    shadow_of(live, BASELINE).replay(take_log(live.usage, live.plan.shape))


_KINDS: dict[str, Callable[[str], None]] = {
    "policy": _policy,
    "forecast": _forecast,
    "trial": _trial,
    "shadow": _shadow,
}

if __name__ == "__main__":
    compile_part(Part(sys.argv[1], sys.argv[2]))
