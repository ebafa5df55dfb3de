"""What every engine has: a controller, a clock, and a place where routing can be recorded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotset.cache.controller import Controller
from hotset.cache.supervisor import Supervisor
from hotset.errors import ModelError
from hotset.owner import Owner
from hotset.runtime.passes import Pass
from hotset.shape import ModelShape
from hotset.trace import Phase
from hotset.trace.recorder import Recorder

Tensor = torch.Tensor


@dataclass
class Clock:
    """Where time and bytes went since the last reset."""

    stall_s: float = 0.0
    experts_s: float = 0.0
    pass_s: float = 0.0
    loaded_bytes: int = 0
    passes: int = 0
    tokens: list[int] = field(default_factory=lambda: [0] * len(Phase))


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
        self.wants_tokens = False  # whether passes should say which tokens they compute
        self.current = Pass(0, 1, 1, Phase.PREFILL, 0)
        self.owner = Owner()

    def check_usable(self) -> None:  # noqa: B027 - a model that is whole runs on, whatever becomes of its engine
        """Refuse a call that would find no experts."""

    @property
    def shape(self) -> ModelShape:
        """The shape of the model served."""
        return self.controller.plan.shape

    def quiet(self) -> AbstractContextManager[Any]:
        """A context in which no event is served."""
        return nullcontext()

    @property
    def total_loaded_bytes(self) -> int:
        """The bytes that events waited for, ever."""
        return self._earlier_bytes + self.clock.loaded_bytes

    def reset_clock(self) -> None:
        """Measure from here."""
        self._earlier_bytes = self.total_loaded_bytes
        self.clock = Clock()

    def begin(self, run: Pass) -> None:
        """Say which forward pass the next events belong to."""
        self.current = run

    def end(self, run: Pass, seconds: float) -> None:
        """Say that a pass is over, and how long it took."""
        self.note_time(run, seconds)
        self.clock.passes += 1
        self.clock.tokens[run.phase] += run.batch * run.length
        if self.supervisor is not None:
            self.supervisor.after_pass()

    def note_time(self, run: Pass, seconds: float) -> None:  # noqa: ARG002 - some tell whoever guesses
        """Take in how long a pass took."""
        self.clock.pass_s += seconds

    def catch_up(self) -> None:  # noqa: B027 - only devices that work on their own are ever ahead
        """Take in all that was served so far."""

    def driven(self) -> dict[str, str]:
        """Who says what happens on the device, where that is a question."""
        return {}

    def record(self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        """Note what one layer routed, if anybody wants to know, and what the routers ahead make of its input."""
        run, recorder = self.current, self.recorder
        if recorder is None:
            return
        chosen, mass = index.cpu().numpy(), weights.detach().to(torch.float16).cpu().numpy()
        said = None if self.gate is None else self.gate(layer, hidden).cpu().numpy()
        request = requests_of(run, len(index))
        recorder.note(run.number, layer, chosen, mass, request, run.phase, run.token_ids, said)

    @abstractmethod
    def forward(self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The output of one layer's experts for hidden [tokens, width], index and weights [tokens, top_k]."""

    @abstractmethod
    def resident_bytes(self) -> dict[str, int]:
        """The bytes held, by what for."""

    def settle(self) -> None:  # noqa: B027 - only devices that work on their own have something to add
        """Bring the clock up to date."""

    @abstractmethod
    def close(self) -> None:
        """Give back threads, files and memory."""


def requests_of(run: Pass, tokens: int) -> npt.NDArray[np.int32]:
    """Which request each token of a pass is of."""
    request = run.first_request + np.repeat(np.arange(run.batch), run.length)
    return (request if len(request) == tokens else np.full(tokens, run.first_request)).astype(np.int32)


def refuse_training(module: torch.nn.Module) -> None:
    """Gradients through weights that come and go would be silently wrong."""
    if module.training and torch.is_grad_enabled():
        raise ModelError("hotset runs models, it does not train them: call model.eval() first")
