"""Whether fetching ahead pays on a live engine: what hotset.forecasts._payoff decides, event by event."""

from __future__ import annotations

from typing import Any

import numpy as np

from hotset.forecasts._payoff import WITH, WITHOUT, most_now, note_now, note_pass_now, start_payoff


class Payoff:
    """Keeps, for each layer, how long events stall with guesses and without, and how many guesses arrive in time."""

    def __init__(self, layers: int, *, auto: bool = True, most: int = 64) -> None:
        self.state = start_payoff(layers, auto=auto, most=most)
        self._number = 0

    def most(self, layer: int, number: int) -> int:
        """How many experts of a layer to send for in the pass of this number."""
        return most_now(self.state, layer, number)

    @property
    def idle(self) -> bool:
        """Whether nothing is guessed at all for the time being."""
        return bool(self.state.off_until[-1] > self._number)

    def note(self, layer: int, number: int, stall_s: float, in_time: int, late: int) -> None:
        """Take in how an event went: how long it stalled, and what of its guesses came in time or late."""
        note_now(self.state, layer, number, stall_s, in_time, late)

    def note_pass(self, number: int, seconds: float) -> None:
        """Take in how long a whole decode pass took, guessing included."""
        self._number = number
        note_pass_now(self.state, number, seconds)

    def as_dict(self) -> dict[str, Any]:
        """What was decided, and on what evidence."""
        state = self.state
        with_ms, without_ms = (1e3 * state.stall_s[kind] for kind in (WITH, WITHOUT))
        return {
            "auto": bool(state.options[0]),
            "switched_off": bool(state.off_until[-1] > 0),
            "layers_switched_off": np.flatnonzero(state.off_until[:-1] > 0).tolist(),
            "pass_ms_with": float(with_ms[-1]),
            "pass_ms_without": float(without_ms[-1]),
            "stall_ms_with": with_ms[:-1].round(4).tolist(),
            "stall_ms_without": without_ms[:-1].round(4).tolist(),
            "most": state.most[:-1].tolist(),
        }
