"""Events and traces for the tests of forecasts: those that `hotset.testing` has."""

from hotset.testing.forecast_events import SHAPE, Live, events_of, random_trace, seen

__all__ = ["SHAPE", "Live", "events_of", "random_trace", "seen"]
