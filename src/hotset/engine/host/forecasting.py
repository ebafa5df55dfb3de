"""Predictions by a forecast: the likeliest experts of the next layers, as many as arrive in time, where that pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotset.engine.batch import ExpertBatch
from hotset.engine.host.prefetcher import IsNear
from hotset.engine.step import Step
from hotset.forecasts import Forecast, Seen
from hotset.forecasts._kernel import steps_of
from hotset.prefetch import PrefetchPlan, PrefetchTrial
from hotset.prefetch.votes import rank_by_votes
from hotset.shape import ExpertKey, ModelShape

Gate = Callable[[int, torch.Tensor, int, int], torch.Tensor]
"""What the routers of the next layers make of a layer's input: of layer, input, distances and width."""


class ForecastPredictor:
    """Asks one forecast, in the order in which layers run, and chooses by a plan."""

    def __init__(
        self,
        forecast: Forecast,
        shape: ModelShape,
        plan: PrefetchPlan,
        *,
        gate: Gate | None = None,
        trial: PrefetchTrial | None = None,
        slot_of: npt.NDArray[Any] | None = None,
    ) -> None:
        self.forecast, self.shape, self.plan, self.gate = forecast, shape, plan, gate
        self.trial = trial or PrefetchTrial.of(plan, shape.layers)
        self.state = forecast.start(shape)
        self._steps = steps_of(type(forecast))
        self._slot_of = np.full((shape.layers, shape.experts), -1, np.int32) if slot_of is None else slot_of
        self._probabilities = np.zeros(shape.experts)
        self._picked = np.zeros(plan.max_ranks, np.int64)
        self._none = np.full((1, 1), -1, np.int16)

    @property
    def needs_tokens(self) -> bool:
        """Whether the forecast goes by the tokens of a step."""
        return self.forecast.uses_tokens

    def choose(self, layer: int, event: ExpertBatch, step: Step, free_rows: int, is_near: IsNear) -> list[ExpertKey]:
        """The likeliest experts of the next layers that are not near, as far as sending for them pays.

        The nearest layer goes first, and of a layer the likeliest.
        """
        if self.trial.is_off(step.number):
            return []  # not even learning is free
        seen = self._seen(layer, event, step)
        self._steps.observe(self.state, *seen)
        wanted: list[ExpertKey] = []
        for distance in range(1, self.plan.reach + 1):
            later, target = divmod(layer + distance, self.shape.layers)
            if later and not self.plan.wraps:
                break
            most = min(free_rows - len(wanted), self.trial.most(target, step.number + later))
            if most:
                wanted += self._likeliest(seen, target, distance, most, is_near)
        return wanted

    def ask_device(self, layer: int, hidden: torch.Tensor, step: Step) -> torch.Tensor | None:
        """What the next layers' routers predict from this layer's input, as numbers on its device."""
        if self.gate is None or self.trial.is_control_step(step.number):
            return None
        return self.gate(layer, hidden, self.plan.reach, self.plan.max_ranks)

    def note_step(self, step: Step, seconds: float) -> None:
        """Learn how long a whole pass took."""
        self.trial.note_step(step.number, seconds)

    def note_event(self, layer: int, step: Step, stall_s: float, in_time: int, late: int) -> None:
        """Learn how an event went."""
        self.trial.note_event(layer, step.number, stall_s, in_time, late)

    def observe(self, layer: int, event: ExpertBatch, step: Step) -> None:
        """Learn from an event after which nothing is prefetched, as in a prompt."""
        self._steps.observe(self.state, *self._seen(layer, event, step))

    def _seen(self, layer: int, event: ExpertBatch, step: Step) -> Seen:
        single = step.token_ids is not None and len(step.token_ids) == 1
        token = int(step.token_ids[0]) if single and step.token_ids is not None else -1
        who = event.asking(step, event.tokens // step.per_token(event.tokens), routed=False)
        return Seen(
            layer, event.experts, event.counts, who.tokens, int(step.phase), who.request, token,
            self._predictions(event),
        )  # fmt: skip

    def _predictions(self, event: ExpertBatch) -> npt.NDArray[np.int16]:
        """What the next layers' routers predict; of several tokens the experts that most of them name."""
        if event.predicted_ids is None:
            return self._none
        predicted = event.predicted_ids.reshape(event.tokens, self.plan.reach, -1).astype(np.int16)
        return predicted[0] if len(predicted) == 1 else rank_by_votes(predicted, self.shape.experts)

    def _likeliest(self, seen: Seen, target: int, distance: int, most: int, is_near: IsNear) -> list[ExpertKey]:
        count = self._steps.pick(
            self.state,
            *seen,
            target,
            distance,
            self._slot_of[target],
            self.plan.min_probability,
            self._probabilities,
            self._picked,
        )
        found: list[ExpertKey] = []
        for expert in self._picked[:count].tolist():
            key = ExpertKey(target, expert)
            if len(found) == most:
                break
            if not is_near(key):
                found.append(key)
        return found


def forecast_stats(predictor: ForecastPredictor, counts: Any) -> dict[str, Any]:
    """What was predicted, what came of it, and where it was switched off, as plain values."""
    return {
        "forecast": predictor.forecast.spec,
        "in_time": counts.in_time,
        "late": counts.late,
        "wasted": counts.wasted,
        "in_time_bytes": counts.in_time_bytes,
        "late_bytes": counts.late_bytes,
        "wasted_bytes": counts.wasted_bytes,
        "budget_bytes": [
            most * (predictor.shape.expert_bytes or 0) for most in predictor.trial.state.budget[:-1].tolist()
        ],
        **predictor.trial.as_dict(),
    }
