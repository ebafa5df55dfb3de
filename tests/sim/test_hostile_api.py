"""Nothing that a caller passes ends the interpreter: it is right, or refused in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sim_samples import random_trace

from hotset.cache import Controller, Scope, SlotPlan
from hotset.errors import HotsetError, TraceError
from hotset.policies import Admit, parse
from hotset.prefetch import plan_prefetch
from hotset.shape import ModelShape
from hotset.sim import Sweep, simulate
from hotset.sim.link import Link
from hotset.sim.prefetch import simulate_prefetch
from hotset.trace import Event, Phase

STRESS = Path(__file__).parents[2] / "benchmarks" / "trust" / "api.py"


@pytest.mark.parametrize("scope", ["layer", "pool"])
def test_choices_given_as_text_are_those_of_the_enumeration(scope: str) -> None:
    """A plain string fell through comparisons by identity, and the compiled loop wrote past its arrays."""
    trace = random_trace()
    rows = [
        simulate({"a": trace}, Sweep(policies=["lru"], budgets=["50%"], scope=each, prefill=admit)).as_dict()
        for each, admit in ((scope, "always"), (Scope(scope), Admit.ALWAYS))
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"scope": "Layer "},
        {"scope": 3},
        {"prefill": "never"},
        {"prefill": 7},
        {"mode": "x"},
        {"streams": 0},
        {"streams": "2"},
        {"staging": -1},
        {"staging": 1.5},
        {"fit": "half"},
        {"fit": float("nan")},
        {"seed": -1},
        {"prefetch_slots": -3},
        {"link": "25GB/s"},
        {"prefetch": "nonsense"},
        {"policies": [1]},
        {"policies": 3},
        {"budgets": [b"25%"]},
        {"budgets": ["9" * 5000 + " slots"]},
    ],
    ids=str,
)
def test_a_sweep_refuses_what_makes_no_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(HotsetError) as caught:
        simulate({"a": random_trace()}, Sweep(**{"policies": ["lru"], "budgets": ["50%"], **wrong}))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["experts", "phase", "request", "predictions"])
def test_a_trace_that_was_written_to_is_looked_at_again(name: str) -> None:
    trace = random_trace()
    array = getattr(trace, name)
    if array is None:
        pytest.skip("the sample has none")
    array[(0,) * array.ndim] = np.iinfo(array.dtype).max
    with pytest.raises(TraceError):
        simulate({"a": trace}, Sweep(policies=["lru"], budgets=["50%"]))


@pytest.mark.parametrize(
    "event",
    [
        Event(0, 0, (1, 0), (1, 1), 1, Phase.DECODE),
        Event(0, 0, (1, 1), (1, 1), 1, Phase.DECODE),
        Event(0, 0, (0,), (), 1, Phase.DECODE),
        Event(0, 0, (0,), (1,), 1, 7),
        Event(0, 9, (0,), (1,), 1, Phase.DECODE),
        Event(0, 0, (99,), (1,), 1, Phase.DECODE),
        Event(0, 0, (0,), (1,), 0, Phase.DECODE),
        Event(0, 0, (), (), 1, Phase.DECODE),
    ],
)
def test_an_event_that_cannot_be_is_refused(event: Event) -> None:
    controller = Controller(SlotPlan(ModelShape(2, 6, 2), 6), parse("lru"))
    with pytest.raises(HotsetError):
        controller.serve(event)


def test_events_and_grids_of_the_wrong_size_are_refused() -> None:
    trace = random_trace()
    shape = trace.shape
    controller = Controller(SlotPlan(shape, shape.top_k * shape.layers), parse("lru"))
    events = trace.events()
    events.expert[-1] = 30_000
    with pytest.raises(TraceError, match="experts that do not exist"):
        controller.replay(events)
    for grid in (np.ones((1, 1)), np.ones(3), "x", np.ones((shape.layers, shape.experts + 1))):
        with pytest.raises(HotsetError, match="a grid of numbers"):
            controller.preload(grid)  # type: ignore[arg-type]
    with pytest.raises(HotsetError, match="must be a whole number"):
        simulate_prefetch(trace, controller, Link(1e9, 1e-3), "previous", plan_prefetch("cpu", trace.shape, rows=-1))


def test_random_calls_return_or_are_refused() -> None:
    """A sample; the stress script runs thousands."""
    done = subprocess.run(
        [sys.executable, str(STRESS), "--count", "60", "--seed", "3", "--dry"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
