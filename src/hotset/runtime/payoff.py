"""Whether fetching ahead pays on a live engine: what hotset.forecasts._payoff decides, event by event."""

from __future__ import annotations

from typing import Any

import numpy as np

from hotset.forecasts._payoff import WITH, WITHOUT, most_now, note_now, start_payoff


class Payoff:
    """Keeps, for each layer, how long events stall with guesses and without, and how many guesses arrive in time."""

    def __init__(self, layers: int, *, auto: bool = True, most: int = 64) -> None:
        self.state = start_payoff(layers, auto=auto, most=most)

    def most(self, layer: int, number: int) -> int:
        """How many experts of a layer to send for in the pass of this number."""
        return most_now(self.state, layer, number)

    def note(self, layer: int, number: int, stall_s: float, in_time: int, late: int) -> None:
        """Take in how an event went: how long it stalled, and what of its guesses came in time or late."""
        note_now(self.state, layer, number, stall_s, in_time, late)

    def as_dict(self) -> dict[str, Any]:
        """What was decided, and on what evidence."""
        state = self.state
        return {
            "auto": bool(state.options[0]),
            "layers_switched_off": np.flatnonzero(state.off_until > 0).tolist(),
            "stall_ms_with": (1e3 * state.stall_s[WITH]).round(4).tolist(),
            "stall_ms_without": (1e3 * state.stall_s[WITHOUT]).round(4).tolist(),
            "most": state.most.tolist(),
        }
