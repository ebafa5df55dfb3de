"""What holds for every forecast, event by event on small random workloads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hotset.checks import instance
from hotset.errors import PolicyError
from hotset.forecasts import MAX_DISTANCE, Forecast, parse
from hotset.plugins import resolve
from hotset.policies.base import parse_options
from hotset.testing.forecast_events import SHAPE, Live, events_of, random_trace, seen
from hotset.testing.require import require, require_same

_LONG = 3000  # events of one and the same kind


def check_forecast(forecast: Forecast | type[Forecast] | str) -> None:
    """Check the contract of a forecast, given as such, as its class, or by name or file."""
    if isinstance(forecast, str):
        forecast = parse(resolve(forecast, "forecast"))
    made = instance(forecast() if isinstance(forecast, type) else forecast, Forecast, "a forecast", PolicyError)
    for check in CHECKS:
        check(made)


def probabilities_are_probabilities(forecast: Forecast) -> None:
    """All of them are from 0 to 1, and asking for them changes nothing."""
    for batch in (1, 3):
        live = Live(forecast, SHAPE)
        for event in events_of(random_trace(batch=batch, seed=7)):
            live.observe(event)
            for distance in range(1, MAX_DISTANCE + 1):
                found = live.probabilities(event, distance)
                require(((found >= 0) & (found <= 1)).all(), "a probability is not a number from 0 to 1")
                require_same(live.probabilities(event, distance), found, "asking twice gives two answers")


def runs_are_the_same(forecast: Forecast) -> None:
    """Two runs over the same events say the same: no clock and no chance decides."""
    one, two = Live(forecast, SHAPE), Live(forecast, SHAPE)
    for event in events_of(random_trace(requests=4, seed=8)):
        one.observe(event)
        two.observe(event)
        require_same(one.probabilities(event, 1), two.probabilities(event, 1), "two runs over the same events differ")


def gaps_are_stood(forecast: Forecast) -> None:
    """Layers that are left out, predictions with gaps and repetitions, and none at all."""
    live = Live(forecast, SHAPE)
    for layer in (0, 1, 3, 0, 1, 2, 3):
        for event in (seen(layer, [2, 5], predictions=[[-1, 3, 3, -1, 1]], token=3), seen(layer, [2, 5])):
            live.observe(event)
            found = live.probabilities(event, MAX_DISTANCE)
            require(np.isfinite(found).all(), "an event with a gap makes a probability that is no number")


def long_runs_stay_finite(forecast: Forecast) -> None:
    """The same event again and again makes no number that overflows, nor a probability beyond 1."""
    live = Live(forecast, SHAPE)
    for number in range(_LONG):
        live.observe(seen(number % SHAPE.layers, [1, 4, 6], token=5, predictions=[[4, 1, 6]] * MAX_DISTANCE))
    found = live.probabilities(seen(0, [1, 4, 6], token=5, predictions=[[4, 1, 6]] * MAX_DISTANCE), 1)
    require(((found >= 0) & (found <= 1)).all(), "after a long run a probability is not a number from 0 to 1")


def text_gives_it_back(forecast: Forecast) -> None:
    """Its text, a name and options, makes it again."""
    name, _, options = forecast.spec.partition(":")
    require(name == forecast.name, "its text does not begin with its name")
    again = type(forecast)(**parse_options(type(forecast), options))
    require(again == forecast, f"its text, {forecast.spec}, makes another forecast: {again}")


CHECKS: tuple[Callable[[Forecast], None], ...] = (
    probabilities_are_probabilities,
    runs_are_the_same,
    gaps_are_stood,
    long_runs_stay_finite,
    text_gives_it_back,
)
"""The parts of the contract, in the order in which they are checked."""
