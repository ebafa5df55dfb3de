"""The trial of a live engine: what `hotset.prefetch.trial` decides, event by event and step by step."""

from __future__ import annotations

from typing import Any

import numpy as np

from hotset.prefetch.plan import PrefetchPlan
from hotset.prefetch.trial import (
    AUTO,
    MIN_COMPARISONS,
    ON,
    WITH,
    WITHOUT,
    budget_now,
    is_control_step_now,
    note_event_now,
    note_step_now,
    start_trial,
)


class PrefetchTrial:
    """Compares steps with prefetch and control steps, whole and layer by layer, and says how many experts to send."""

    def __init__(
        self, layers: int, *, auto: bool = True, most: int = 64, adaptive: bool = True, by_layer: bool = True
    ) -> None:
        self.state = start_trial(layers, auto=auto, most=most, adaptive=adaptive, by_layer=by_layer)
        self._number = 0
        self._controls: tuple[int, bool] | None = None  # the step that was asked for last, and whether it is a control

    @classmethod
    def of(cls, plan: PrefetchPlan, layers: int) -> PrefetchTrial:
        """The trial that a plan asks for."""
        return cls(layers, auto=plan.trial, most=plan.rows_per_part, adaptive=plan.adaptive, by_layer=plan.layer_trial)

    def most(self, layer: int, number: int) -> int:
        """How many experts of a layer to prefetch in the step of this number."""
        return 0 if self.is_control_step(number) else budget_now(self.state, layer, number)

    def is_control_step(self, number: int) -> bool:
        """Whether nothing at all is prefetched in the step of this number."""
        if self._controls is None or self._controls[0] != number:
            self._controls = number, is_control_step_now(self.state, -1, number)
        return self._controls[1]

    def is_off(self, number: int) -> bool:
        """Whether prefetch is switched off in the step of this number."""
        return bool(self.state.options[AUTO] and self.state.off_until[-1] > number)

    def note_event(self, layer: int, number: int, stall_s: float, in_time: int, late: int) -> None:
        """Take in how an event went: how long it stalled, and what of its prefetched experts came in time or late."""
        note_event_now(self.state, layer, number, stall_s, in_time, late)

    def note_step(self, number: int, seconds: float) -> None:
        """Take in how long a whole decode step took, prefetch included."""
        self._number, self._controls = number, None  # another decision may come of it
        note_step_now(self.state, number, seconds)

    @property
    def decision(self) -> str:
        """What is done now: "forced", "trial", "on" or "off"."""
        if not self.state.options[AUTO]:
            return "forced"
        if self.is_off(self._number + 1):
            return "off"
        return "on" if self.state.stage[0] == ON else "trial"

    @property
    def reason(self) -> str:
        """Why, in words."""
        if self.decision == "forced":
            return "asked for by name, so nothing is compared"
        saved_ms, base_ms = 1e3 * self.state.saved_s[-1], 1e3 * self.state.mean_s[WITHOUT, -1]
        compared = int(self.state.compared[-1])
        if self.decision == "trial" and compared < MIN_COMPARISONS:
            return (
                f"one of every two steps goes without it; {compared} of at least {MIN_COMPARISONS} comparisons so far"
            )
        what = f"saves {saved_ms:.3f}" if saved_ms >= 0 else f"costs {-saved_ms:.3f}"
        return f"prefetch {what} of {base_ms:.3f} ms per step" + (
            f"; to be tried again at step {int(self.state.off_until[-1])}" if self.decision == "off" else ""
        )

    def as_dict(self) -> dict[str, Any]:
        """What was decided, and on what evidence."""
        state = self.state
        with_ms, without_ms = (1e3 * state.mean_s[kind] for kind in (WITH, WITHOUT))
        return {
            "auto": bool(state.options[AUTO]),
            "decision": self.decision,
            "reason": self.reason,
            "layers_switched_off": np.flatnonzero(state.off_until[:-1] > self._number).tolist(),
            "pass_ms_with": float(with_ms[-1]),
            "pass_ms_without": float(without_ms[-1]),
            "saved_ms": float(1e3 * state.saved_s[-1]),
            "stall_ms_with": with_ms[:-1].round(4).tolist(),
            "stall_ms_without": without_ms[:-1].round(4).tolist(),
            "most": state.budget[:-1].tolist(),
        }
