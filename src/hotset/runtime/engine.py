"""What every engine has: a controller, a clock, and a place where routing can be recorded."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from hotset.cache.controller import Controller
from hotset.cache.supervisor import Supervisor
from hotset.owner import Owner
from hotset.runtime.requests import Request, RequestLog
from hotset.runtime.step import Step
from hotset.shape import ModelShape
from hotset.trace import Phase
from hotset.trace.recorder import Recorder

Tensor = torch.Tensor


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


class Engine(ABC):
    """Serves the experts of all layers of a model."""

    kind = "abstract"

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.clock = Clock()
        self._earlier_bytes = 0
        self.recorder: Recorder | None = None
        self.gate: Callable[[int, Tensor], Tensor] | None = None  # what a recording keeps of the routers ahead
        self.supervisor: Supervisor | None = None
        self.wants_tokens = False  # whether steps should say which tokens they compute
        self._lock = threading.RLock()
        self._log = RequestLog(controller)
        self.owner = Owner()

    def check_usable(self) -> None:  # noqa: B027 - a model that is whole runs on, whatever becomes of its engine
        """Refuse a call that would find no experts."""

    @property
    def shape(self) -> ModelShape:
        """The shape of the model served."""
        return self.controller.plan.shape

    def quiet(self) -> AbstractContextManager[Any]:
        """A context in which no event is served: for whoever looks at the slots, or changes them, in between."""
        return self._lock if self.owner.is_here else nullcontext()

    @property
    def total_loaded_bytes(self) -> int:
        """The bytes that events waited for, ever."""
        return self._earlier_bytes + self.clock.loaded_bytes

    def reset_clock(self) -> None:
        """Measure from here."""
        self._earlier_bytes = self.total_loaded_bytes
        self.clock = Clock()

    def requests(self) -> list[Request]:
        """What each of the last requests used and cost."""
        with self.quiet():
            return self._log.all(self.total_loaded_bytes)

    def serve_request(self, request: int, layer: int) -> None:
        """Say whose the event is that is served next."""
        self._log.serve(request, layer, self.total_loaded_bytes)

    def end(self, step: Step, seconds: float) -> None:
        """Say that a step is over, and how long it took."""
        if not self.owner.is_here:
            return  # in a child the lock may be held for ever
        with self._lock:
            recorder = self.recorder_of(step)
            if recorder is not None:
                recorder.end(step.number)
            self.note_time(step, seconds)
            self.clock.passes += 1
            self.clock.tokens[step.phase] += step.batch * step.length
            if self.supervisor is not None:
                self.supervisor.after_pass()

    def abandon(self, step: Step) -> None:
        """Say that a step was broken off: what it has served stays counted, but it is no pass and leaves no record."""
        if not self.owner.is_here:
            return
        with self._lock:
            recorder = self.recorder_of(step)
            if recorder is not None:
                recorder.abandon(step.number)

    def note_time(self, step: Step, seconds: float) -> None:  # noqa: ARG002 - some tell whoever guesses
        """Take in how long a step took."""
        self.clock.pass_s += seconds

    def catch_up(self) -> None:  # noqa: B027 - only devices that work on their own are ever ahead
        """Take in all that was served so far."""

    def driven(self) -> dict[str, str]:
        """Who says what happens on the device, where that is a question."""
        return {}

    def recorder_of(self, step: Step) -> Recorder | None:
        """Who records a step; a recording holds whole steps, so none that had begun before it."""
        recorder = self.recorder
        return recorder if recorder is not None and recorder.number == step.recording else None

    def record(self, step: Step, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        """Note what one layer routed, if a recording is on, and what the routers ahead make of its input."""
        recorder = self.recorder_of(step)
        if recorder is None:
            return
        chosen, mass = index.cpu().numpy(), weights.detach().to(torch.float16).cpu().numpy()
        with torch.no_grad():
            said = None if self.gate is None else self.gate(layer, hidden).cpu().numpy()
        request = step.requests(len(index))
        recorder.note(step.number, layer, chosen, mass, request, step.phase, step.token_ids, said)

    @abstractmethod
    def forward(self, step: Step, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The output of one layer's experts for hidden [tokens, width], index and weights [tokens, top_k]."""

    @abstractmethod
    def resident_bytes(self) -> dict[str, int]:
        """The bytes held, by what for."""

    def untouched_bytes(self) -> int:
        """What the slots will take of free memory once they are filled."""
        return 0

    def settle(self) -> None:  # noqa: B027 - only devices that work on their own have something to add
        """Bring the clock up to date."""

    @abstractmethod
    def close(self) -> None:
        """Give back threads, files and memory."""
