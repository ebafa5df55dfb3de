"""What an engine has served: where time and bytes went, what each request cost, and who records the routing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from hotset.cache.controller import Controller
from hotset.engine.requests import Request, RequestLog
from hotset.engine.step import Step
from hotset.trace import Phase
from hotset.trace.recorder import Recorder

Tensor = torch.Tensor
Routers = Callable[[int, Tensor], Tensor]
"""What the routers of the next layers make of a layer's input: expert ids of layer and input."""
LoadListener = Callable[[int, npt.NDArray[np.int32]], None]
"""Told of every event that had to load: its layer, and rows of expert, slot, layer and expert evicted."""


@dataclass
class Revisits:
    """What backward passes asked for: events, experts that were resident, and those that were fetched."""

    events: int = 0
    resident: int = 0
    fetched: int = 0
    fetched_bytes: int = 0


@dataclass
class Clock:
    """Where time and bytes went since the last reset."""

    stall_s: float = 0.0
    experts_s: float = 0.0
    pass_s: float = 0.0
    loaded_bytes: int = 0
    passes: int = 0
    tokens: list[int] = field(default_factory=lambda: [0] * len(Phase))
    backward: Revisits = field(default_factory=Revisits)


class EngineStats:
    """The figures of one engine; callers hold its lock."""

    def __init__(self, controller: Controller) -> None:
        self.clock = Clock()
        self.recorder: Recorder | None = None
        self.routers: Routers | None = None  # what a recording keeps of the routers of the next layers
        self.listener: LoadListener | None = None
        self._earlier_bytes = 0
        self._log = RequestLog(controller)

    @property
    def loaded_bytes(self) -> int:
        """The bytes that events waited for, ever."""
        return self._earlier_bytes + self.clock.loaded_bytes

    def reset(self) -> None:
        """Measure from here."""
        self._earlier_bytes = self.loaded_bytes
        self.clock = Clock()

    def requests(self) -> list[Request]:
        """What each of the last requests used and cost."""
        return self._log.all(self.loaded_bytes)

    def begin_event(self, step: Step, layer: int) -> None:
        """Say whose the event is that is served next."""
        self._log.serve(step.first_request, layer, self.loaded_bytes)

    def end_step(self, step: Step, seconds: float) -> None:
        """Say that a step is over, and how long it took."""
        recorder = self.recorder_of(step)
        if recorder is not None:
            recorder.end(step.number)
        self.clock.pass_s += seconds
        self.clock.passes += 1
        self.clock.tokens[step.phase] += step.batch * step.length

    def abandon_step(self, step: Step) -> None:
        """Say that a step was broken off: what it has served stays counted, but it leaves no record."""
        recorder = self.recorder_of(step)
        if recorder is not None:
            recorder.abandon(step.number)

    def start_recording(self, recorder: Recorder, routers: Routers | None) -> None:
        """Record the steps that begin from here on."""
        self.recorder, self.routers = recorder, routers

    def stop_recording(self) -> None:
        """Record nothing any more."""
        self.recorder = self.routers = None

    def listen(self, listener: LoadListener | None) -> None:
        """Tell a listener of every event that loads experts."""
        self.listener = listener

    def recorder_of(self, step: Step) -> Recorder | None:
        """Who records a step; a recording holds whole steps, so none that had begun before it."""
        recorder = self.recorder
        return recorder if recorder is not None and recorder.number == step.recording else None

    def record(self, step: Step, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        """Note what one layer routed, if a recording is on, and what the next routers predict from its input."""
        recorder = self.recorder_of(step)
        if recorder is None:
            return
        chosen, mass = index.cpu().numpy(), weights.detach().to(torch.float16).cpu().numpy()
        with torch.no_grad():
            predicted = None if self.routers is None else self.routers(layer, hidden).cpu().numpy()
        request = step.requests(len(index))
        recorder.note(step.number, layer, chosen, mass, request, step.phase, step.token_ids, predicted)
