"""Whether fetching ahead pays on a live engine: what hotset.forecasts._payoff decides, event by event."""

from __future__ import annotations

from typing import Any

import numpy as np

from hotset.forecasts._payoff import (
    FEW,
    ON,
    WITH,
    WITHOUT,
    goes_without_now,
    most_now,
    note_now,
    note_pass_now,
    start_payoff,
)


class Payoff:
    """Compares passes with guesses and passes without, as a whole and layer by layer, and says how many to send."""

    def __init__(self, layers: int, *, auto: bool = True, most: int = 64) -> None:
        self.state = start_payoff(layers, auto=auto, most=most)
        self._number = 0

    def most(self, layer: int, number: int) -> int:
        """How many experts of a layer to send for in the pass of this number."""
        return most_now(self.state, layer, number)

    def goes_without(self, number: int) -> bool:
        """Whether nothing at all is guessed in the pass of this number."""
        return goes_without_now(self.state, -1, number)

    def is_off(self, number: int) -> bool:
        """Whether guesses are switched off in the pass of this number."""
        return bool(self.state.options[0] and self.state.off_until[-1] > number)

    def note(self, layer: int, number: int, stall_s: float, in_time: int, late: int) -> None:
        """Take in how an event went: how long it stalled, and what of its guesses came in time or late."""
        note_now(self.state, layer, number, stall_s, in_time, late)

    def note_pass(self, number: int, seconds: float) -> None:
        """Take in how long a whole decode pass took, guessing included."""
        self._number = number
        note_pass_now(self.state, number, seconds)

    @property
    def decision(self) -> str:
        """What is done now: "forced", "trial", "on" or "off"."""
        if not self.state.options[0]:
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
        if self.decision == "trial" and compared < FEW:
            return f"one of every two passes goes without guesses; {compared} of at least {FEW} comparisons so far"
        what = f"save {saved_ms:.3f}" if saved_ms >= 0 else f"cost {-saved_ms:.3f}"
        return f"guesses {what} of {base_ms:.3f} ms per pass" + (
            f"; to be tried again at pass {int(self.state.off_until[-1])}" if self.decision == "off" else ""
        )

    def as_dict(self) -> dict[str, Any]:
        """What was decided, and on what evidence."""
        state = self.state
        with_ms, without_ms = (1e3 * state.mean_s[kind] for kind in (WITH, WITHOUT))
        return {
            "auto": bool(state.options[0]),
            "decision": self.decision,
            "reason": self.reason,
            "layers_switched_off": np.flatnonzero(state.off_until[:-1] > self._number).tolist(),
            "pass_ms_with": float(with_ms[-1]),
            "pass_ms_without": float(without_ms[-1]),
            "saved_ms": float(1e3 * state.saved_s[-1]),
            "stall_ms_with": with_ms[:-1].round(4).tolist(),
            "stall_ms_without": without_ms[:-1].round(4).tolist(),
            "most": state.most[:-1].tolist(),
        }
