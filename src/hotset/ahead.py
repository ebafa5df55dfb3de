"""What a live cache and replays compile, ahead of the work: parts that are compiled side by side in processes, once.

Numba keeps machine code on disk for one version of Python, of Numba and of the sources, and one kind of processor: so
it cannot come with the package. What is there is loaded; the rest is compiled before an answer or a replay begins.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hotset.compiling import NotKeptError, can_be_kept, only_kept

if TYPE_CHECKING:
    from hotset.policies.base import Named
    from hotset.sim.sweep import Replays

NEXT_ROUTER = "gate"
"""The forecast of `--prefetch auto`."""
USUAL_POLICIES = ("blend", "nextuse", "lfu", "belady", "lru")
"""What is replayed by `plan`, and by `analyze` where nothing else is asked of it."""
_MODULE = "hotset.ahead"
_SLOWEST = ("best", "eam", "transition", "blend", "layered")
"""Policies and forecasts that take long to compile: they are begun first."""


class Part(NamedTuple):
    """Code that is compiled together: its kind, and the policy or forecast that it is for."""

    kind: str
    name: str = ""


def parts_of(policy: str, prefetch: str = "auto", *, warm: bool = False) -> list[Part]:
    """What a cache with this policy and this prefetch compiles, the longest first; `warm`: begun with a profile."""
    from hotset.forecasts import parse as parse_forecast
    from hotset.policies import parse

    parts = [_part(kind, parse(policy)) for kind in (("policy", "warm") if warm else ("policy",))]
    if prefetch != "off":
        name = NEXT_ROUTER if prefetch == "auto" else prefetch
        parts += [_part("forecast", parse_forecast(name)), Part("trial")]
    return [*parts, Part("shadow")]


def parts_of_replays(replays: Replays, *, curve: bool = False, walk: bool = False) -> list[Part]:
    """What replays compile, each part once and the longest first.

    `curve` is LRU at every size, `walk` which experts were resident before each event.
    """
    from hotset.forecasts import parse as parse_forecast
    from hotset.policies import parse

    found = [_part("replay", parse(spec)) for spec in replays.policies]
    found += [_part("judge", parse_forecast(spec)) for spec in replays.judged]
    found += [_part("prefetch", parse_forecast(spec)) for spec in replays.prefetched]
    found += [Part(kind) for kind, wanted in (("curve", curve), ("walk", walk)) if wanted]
    once = list({(part.kind, part.name.partition(":")[0]): part for part in found}.values())
    return sorted(once, key=_turn)


def parts_of_products(folder: Path) -> list[Part]:
    """What products with the experts of a packed model compile on a CPU: a part for each weight format."""
    from hotset.store.packed import is_packed, open_index

    if not is_packed(folder):
        return []
    shapes: dict[str, set[str]] = {}
    for layer in open_index(folder).plan.layers:
        for matrix in layer.layout.matrices:
            shapes.setdefault(matrix.format, set()).add(f"{matrix.outputs}x{matrix.inputs}")
    return [Part("products", " ".join([spec, *sorted(found)])) for spec, found in shapes.items()]


def usual_parts() -> list[Part]:
    """What the usual replays compile."""
    from hotset.sim.sweep import Replays

    return parts_of_replays(Replays(USUAL_POLICIES), walk=True)


def all_parts() -> list[Part]:
    """What all policies and forecasts compile, live and in replays."""
    from hotset.forecasts import names as forecasts
    from hotset.policies import names, parse
    from hotset.sim.sweep import Replays

    live = [part for name in names() if not parse(name).offline for part in parts_of(name, "off", warm=True)]
    ahead = [part for name in forecasts() for part in parts_of("lru", name)]
    known = tuple(forecasts())
    replays = parts_of_replays(Replays(tuple(names()), known, known), curve=True, walk=True)
    return list(dict.fromkeys([*replays, *live, *ahead]))


def missing(parts: Iterable[Part]) -> list[Part]:
    """Those that are not on disk; the others are loaded."""
    return [part for part in parts if not is_compiled(part)]


def is_compiled(part: Part) -> bool:
    """Whether all of a part is on disk; it is loaded then."""
    try:
        with only_kept():
            compile_part(part)
    except NotKeptError:
        return False
    return True


def compile_parts(parts: list[Part], meanwhile: Callable[[], object] = lambda: None) -> Iterator[Part]:
    """Compile these parts, in as many processes as there are cores, and yield each that is done.

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


def _part(kind: str, which: Named) -> Part:
    """The part of a policy or forecast; that of a file is named by the file, which another process knows as well."""
    from hotset.plugins import file_of

    file = file_of(type(which))
    return Part(kind, which.spec if file is None else file + which.spec.removeprefix(which.name))


def _turn(part: Part) -> tuple[int, bool]:
    """When a part is begun: the longer it takes, the earlier."""
    name = part.name.partition(":")[0]
    return _SLOWEST.index(name) if name in _SLOWEST else len(_SLOWEST), part.kind != "prefetch"


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
    from hotset.plugins import resolve

    log = RequestLog(_serve(resolve(name), 2))
    log.serve(1, 0, 0)
    log.all(0)


def _warm(name: str) -> None:
    """Begin with the rates of a profile, and look for slots as what fills them in the background does."""
    from hotset.cache import Controller
    from hotset.plugins import resolve
    from hotset.policies import parse

    cache = Controller(_small(), parse(resolve(name)))
    cache.seed_from_rates(np.full((1, 4), 0.5), 2)
    cache.victim(0)


def _forecast(name: str) -> None:
    """Learn from an event, and pick what to prefetch."""
    from hotset.forecasts import parse
    from hotset.forecasts._kernel import steps_of
    from hotset.plugins import resolve
    from hotset.prefetch import MIN_PROBABILITY

    forecast, shape = parse(resolve(name, "forecast")), _small().shape
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


def _walk(_: str) -> None:
    """Follow which experts are resident in a replay."""
    from hotset.analysis.residency_walk import follow
    from hotset.cache.controller import Replayed
    from hotset.sim.small_runs import small_trace

    events = small_trace().events()
    layers, experts = events.shape.layers, events.shape.experts
    done: Any = Replayed(None, np.zeros(len(events), np.int32), np.zeros((0, 5), np.int32))  # type: ignore[arg-type]
    follow(events, done, np.zeros(len(events), np.bool_), np.zeros((layers, experts), np.bool_), np.zeros(layers, int))


def _products(name: str) -> None:
    """Make the kernels of some shapes in a weight format; they are compiled as they are made."""
    from hotset.formats import parse

    spec, *shapes = name.split(" ")
    for shape in shapes:
        outputs, _, inputs = shape.partition("x")
        parse(spec).row_kernels(int(outputs), int(inputs))


def _run(kind: str, name: str) -> None:
    from hotset.sim import small_runs

    getattr(small_runs, kind)(name)


_KINDS: dict[str, Callable[[str], None]] = {
    "policy": _policy,
    "warm": _warm,
    "forecast": _forecast,
    "trial": _trial,
    "shadow": _shadow,
    "walk": _walk,
    "products": _products,
    **{kind: partial(_run, kind) for kind in ("replay", "judge", "prefetch", "curve")},
}

if __name__ == "__main__":
    compile_part(Part(sys.argv[1], sys.argv[2]))
