"""Random calls of the Python API with random arguments: each returns, or raises a HotsetError of one line.

Compiled loops run without bounds checks, so a wrong argument that reaches one ends the interpreter. The calls run in
child processes under a limit of memory; a child that dies, hangs or raises anything else is a fault.

    python benchmarks/trust/api.py --count 2000 --seed 0
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from children import run

from hotset.cache import Controller, Scope, SlotPlan
from hotset.errors import HotsetError
from hotset.policies import Admit, names
from hotset.policies import parse as parse_policy
from hotset.prefetch import plan_prefetch
from hotset.shape import Budget, ModelShape
from hotset.sim import Sweep, simulate
from hotset.sim.curve import lru_curve
from hotset.sim.forecasting import evaluate
from hotset.sim.link import Link, parse_duration, parse_speed
from hotset.sim.prefetch import simulate_prefetch
from hotset.trace import Event, Phase, Trace
from hotset.trace.combine import concat, interleave

MEMORY_BYTES = 3 << 30

POLICIES = ["lru", "lfu", "static", "belady"]  # few, since each is compiled once
FORECASTS = ["previous", "off", "oracle", "gate", "token"]
NONSENSE: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    7,
    10**6,
    10**12,
    2**63,
    -(2**70),
    0.5,
    -0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "pool",
    "layer",
    "POOL",
    "lru",
    "25%",
    "0%",
    "1 slots",
    "9 slots",
    "99999 slots",
    "8GiB",
    "x" * 300,
    "\x1b[31m",
    b"pool",
    [],
    (),
    {},
    ["lru"],
    ["25%", 3],
    [None],
    {"a": 1},
    object,
    np.float32(3),
    np.int64(2),
    np.zeros(0),
    np.arange(4),
    np.zeros((2, 2)),
    "always",
    "free",
    "decode",
    "batch",
    "turns",
    "auto",
    "gate",
    1j,
]


def sample_trace(rng: random.Random) -> Trace:
    """A small trace that is right."""
    draw = np.random.default_rng(rng.randrange(2**32))
    layers, experts = rng.choice([1, 2, 3]), rng.choice([2, 4, 9])
    top_k, tokens = rng.choice([1, 2]), rng.choice([1, 4, 12])
    ids = draw.permuted(np.tile(np.arange(experts, dtype=np.int16), (tokens, layers, 1)), axis=2)[:, :, :top_k]
    request = np.sort(draw.integers(0, 3, tokens))
    return Trace(
        ModelShape(layers, experts, top_k, rng.choice([None, 1000])),
        np.ascontiguousarray(ids),
        np.unique(request, return_inverse=True)[1].astype(np.int32),
        np.arange(tokens, dtype=np.int32),
        draw.integers(0, 2, tokens).astype(np.uint8),
        token_ids=draw.integers(-5, 99, tokens).astype(np.int32) if rng.random() < 0.5 else None,
        predictions=draw.integers(-1, experts, (tokens, layers, 2, 3)).astype(np.int16) if rng.random() < 0.5 else None,
    )


def maybe(rng: random.Random, right: Any, share: float = 0.3) -> Any:
    """The right value, or sometimes another one."""
    return rng.choice(NONSENSE) if rng.random() < share else right


def random_array(rng: random.Random) -> np.ndarray[Any, Any]:
    """An array of any type, shape and content."""
    draw = np.random.default_rng(rng.randrange(2**32))
    shape = tuple(rng.choice([0, 1, 2, 3, 12]) for _ in range(rng.choice([0, 1, 2, 3, 4])))
    dtype = rng.choice(["int8", "int16", "int32", "int64", "uint8", "float16", "float64", ">i2", "U3", "bool", "O"])
    return draw.integers(-3, 40_000, shape).astype(dtype)


def spoil(rng: random.Random, trace: Trace) -> None:
    """Write something wrong into a trace that was found right."""
    name = rng.choice(["experts", "request", "step", "phase", "predictions", "token_ids"])
    array = getattr(trace, name)
    if array is not None:
        place = tuple(rng.randrange(size) for size in array.shape)
        high = np.iinfo(array.dtype).max
        array[place] = rng.choice([high, high // 2, 200, 9, np.iinfo(array.dtype).min])


def make_trace(rng: random.Random) -> object:
    """A trace with some of its parts replaced."""
    trace = sample_trace(rng)
    parts = {name: getattr(trace, name) for name in Trace.__dataclass_fields__}
    for name in rng.sample(list(parts), rng.choice([1, 1, 2])):
        parts[name] = rng.choice([random_array(rng), rng.choice(NONSENSE), parts[name]])
    return Trace(**parts).events()


def use_trace(rng: random.Random) -> object:
    """A method of a trace, spoilt or not."""
    trace = sample_trace(rng)
    if rng.random() < 0.3:
        spoil(rng, trace)
    value, other = maybe(rng, 0.5, 0.7), maybe(rng, 1, 0.5)
    calls: list[Callable[[], object]] = [
        lambda: trace.split(value, other),
        lambda: trace.select(value),
        lambda: trace.take(rng.choice([value, random_array(rng)])),
        lambda: trace.with_expert_bytes(value),
        lambda: interleave(trace, value, maybe(rng, "batch")),
        lambda: concat([trace, sample_trace(rng)]),
        lambda: trace.events().check(),
        lambda: list(trace),
        lambda: lru_curve(trace.events(), maybe(rng, "pool"), maybe(rng, Phase.DECODE)).hits(3),
    ]
    return rng.choice(calls)()


def random_sweep(rng: random.Random) -> Sweep:
    """A sweep with some settings that make no sense."""
    right: dict[str, Any] = {
        "policies": rng.sample(POLICIES, 2),
        "budgets": [rng.choice(["50%", "4 slots", "3kB"])],
        "scope": "pool",
        "streams": rng.choice([1, 3]),
        "mode": "batch",
        "staging": 0,
        "prefill": rng.choice([*Admit, "free"]),
        "fit": rng.choice([0, 0.5, 1]),
        "seed": 0,
        "link": Link(1e9, 1e-3),
        "prefetch": rng.choice(FORECASTS),
        "ahead": 2,
    }
    chosen = rng.sample(list(right), rng.choice([1, 3, 6, 12]))
    wrong = rng.choice(chosen) if rng.random() < 0.6 else None
    return Sweep(**{name: rng.choice(NONSENSE) if name == wrong else right[name] for name in chosen})


def run_sweep(rng: random.Random) -> object:
    """A simulation."""
    trace = sample_trace(rng)
    sweep = random_sweep(rng)
    if rng.random() < 0.3:
        spoil(rng, trace)
    return simulate(
        maybe(rng, {rng.choice(["a", "a", "a", 3, None]): maybe(rng, trace, 0.05)}, 0.05), maybe(rng, sweep, 0.1)
    )


def use_cache(rng: random.Random) -> object:
    """A cache, and events given to it one by one."""
    plan = SlotPlan(
        maybe(rng, ModelShape(2, 6, 2), 0.1), maybe(rng, 5), maybe(rng, "pool"), maybe(rng, 0), maybe(rng, 0)
    )
    policy = parse_policy(rng.choice(POLICIES[:3]))
    controller = Controller(plan, maybe(rng, policy, 0.1), prefill=maybe(rng, "free"))
    experts = rng.choice([(0, 1), (1, 0), (2, 2), (5,), (6,), (-1,), (), ("x",), (0, 1, 2, 3, 4, 5)])
    controller.serve(
        Event(0, maybe(rng, 1), experts, maybe(rng, (1,) * len(experts)), maybe(rng, 1), maybe(rng, Phase.DECODE))
    )
    calls: list[Callable[[], object]] = [
        lambda: controller.preload(maybe(rng, random_array(rng))),
        lambda: controller.seed_from_rates(maybe(rng, np.ones((2, 6))), 4),
        lambda: controller.pin([maybe(rng, (0, 1))]),
        lambda: controller.residency.drop([maybe(rng, (0, 1))]),
        lambda: controller.replay(sample_trace(rng).events(), log=rng.random() < 0.5),
    ]
    return rng.choice(calls)()


def look_ahead(rng: random.Random) -> object:
    """Forecasts on a trace."""
    trace = sample_trace(rng)
    if rng.random() < 0.5:
        return evaluate(trace, maybe(rng, ["previous"]), maybe(rng, (1, 2)), maybe(rng, 0.5))
    controller = Controller(SlotPlan(trace.shape, 4), parse_policy("lru"))
    link = Link(maybe(rng, 1e9), maybe(rng, 1e-3), maybe(rng, 0.0), maybe(rng, 0.5))
    plan = plan_prefetch(maybe(rng, "cpu"), trace.shape, rows=maybe(rng, 2))
    plan = replace(plan, layers_ahead=maybe(rng, 1), min_probability=maybe(rng, 0.1))
    return simulate_prefetch(trace, controller, link, maybe(rng, rng.choice(FORECASTS)), plan)


def read_words(rng: random.Random) -> object:
    """Text and numbers as people write them."""
    value = maybe(rng, "3", 0.8)
    calls: list[Callable[[], object]] = [
        lambda: Budget.parse(value),
        lambda: Budget(value, None, None).slots_for(ModelShape(2, 4, 1, 100)),
        lambda: Budget(None, value).slots_for(ModelShape(2, 4, 1)),
        lambda: parse_speed(value),
        lambda: parse_duration(value),
        lambda: parse_policy(f"{rng.choice(names())}:{rng.choice(['tokens', 'admit', 'protected', 'x'])}={value}"),
        lambda: parse_policy(value),
        lambda: ModelShape(value, maybe(rng, 4), maybe(rng, 2), maybe(rng, None)),
        lambda: SlotPlan(ModelShape(2, 4, 1), value, rng.choice([*Scope, value])).bounds(),
    ]
    return rng.choice(calls)()


KINDS: list[Callable[[random.Random], object]] = [make_trace, use_trace, run_sweep, use_cache, look_ahead, read_words]


def case(seed: int) -> str:
    """One call."""
    rng = random.Random(seed)  # noqa: S311 - chance, not secrets
    kind = rng.choice(KINDS)
    try:
        kind(rng)
    except HotsetError as error:
        error.kind = kind.__name__  # type: ignore[attr-defined]
        raise
    return kind.__name__


if __name__ == "__main__":
    run(Path(__file__).resolve(), case, "trust_api", MEMORY_BYTES, __doc__ or "")
