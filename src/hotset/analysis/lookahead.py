"""How well the routers of the layers ahead predict what those layers will use, where a trace recorded it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hotset.sim.forecasting import Score, evaluate
from hotset.trace import Phase, Trace


@dataclass(frozen=True)
class LookAhead:
    """The forecast `gate`, judged so many layers ahead.

    Of k predictions for k experts precision and recall are the same number; of 2k they are not.
    """

    judged: str
    scores: list[Score]

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain values, for JSON; time belongs to `hotset forecast`."""
        scores = [asdict(score) for score in self.scores]
        return {"judged": self.judged, "scores": [_without_time(score) for score in scores]}


def _without_time(score: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in score.items() if name != "us_per_event"}


def measure_lookahead(trace: Trace) -> LookAhead | None:
    """Judge the recorded predictions on all new tokens; None where there are none of either."""
    if trace.predictions is None or not trace.count(Phase.DECODE):
        return None
    distances = [d for d in range(1, trace.predictions.shape[2] + 1) if d < trace.shape.layers]
    if not distances:
        return None
    found = evaluate(trace, ["gate"], distances, 0.0)
    return LookAhead(found.judged, found.scores)
