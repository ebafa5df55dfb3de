"""The engine: serves one event after another, the same way on every device."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from hotset.cache.controller import Controller
from hotset.errors import HotsetError, ModelError
from hotset.runtime.event import LiveEvent
from hotset.runtime.passes import Pass
from hotset.shape import ExpertKey, ModelShape
from hotset.trace import Phase
from hotset.trace.recorder import Recorder

Tensor = torch.Tensor
Loads = npt.NDArray[np.int32]
LoadListener = Callable[[int, Loads], None]
"""Told of every event that had to load: its layer, and rows of expert, slot, layer and expert that left."""


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
    """Experts of all layers under one controller; subclasses know how bytes and arithmetic are done on a device."""

    kind = "abstract"

    def __init__(self, controller: Controller, experts_per_layer: Sequence[int]) -> None:
        self.controller = controller
        self.clock = Clock()
        self.recorder: Recorder | None = None
        self.listener: LoadListener | None = None
        self.current = Pass(0, 1, 1, Phase.PREFILL, 0)
        self._experts = list(experts_per_layer)
        self._lock = threading.RLock()
        self._broken = False

    @property
    def shape(self) -> ModelShape:
        """The shape of the model served."""
        return self.controller.plan.shape

    def begin(self, run: Pass) -> None:
        """Say which forward pass the next events belong to."""
        self.current = run

    def end(self, run: Pass, seconds: float) -> None:
        """Say that a pass is over, and how long it took."""
        self.clock.pass_s += seconds
        self.clock.passes += 1
        self.clock.tokens[run.phase] += run.batch * run.length

    @torch.no_grad()
    def forward(self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The output of one layer's experts for hidden [tokens, width], index and weights [tokens, top_k]."""
        with self._lock:
            if self._broken:
                raise HotsetError("an earlier failure left this engine unusable: load the model again")
            began = time.perf_counter()
            event = LiveEvent(hidden, index, weights, self._experts[layer])
            if len(event.experts):
                self._serve(layer, event)
            if self.recorder is not None:
                self._record(layer, index, weights)
            total = event.total()
            self.clock.experts_s += time.perf_counter() - began
            return total

    def _serve(self, layer: int, event: LiveEvent) -> None:
        run = self.current
        missing = self.controller.route(layer, event.experts, event.counts, event.tokens, run.phase)
        if missing == 0:
            self.compute(layer, event, None)
            return
        loads = self.controller.table.loads[:missing].copy()
        if self.listener is not None:
            self.listener(layer, loads)
        try:
            self.fetch_and_compute(layer, event, loads)
        except BaseException:
            self._broken = True  # until the slots are known to be in order again
            self.controller.drop(ExpertKey(layer, int(expert)) for expert in self.lost(loads))
            self._broken = False
            raise

    def _record(self, layer: int, index: Tensor, weights: Tensor) -> None:
        run, recorder = self.current, self.recorder
        if recorder is None:
            return
        request = run.first_request + np.repeat(np.arange(run.batch), run.length)
        if len(request) != len(index):
            request = np.full(len(index), run.first_request)
        chosen, mass = index.cpu().numpy(), weights.detach().to(torch.float16).cpu().numpy()
        recorder.note(run.number, layer, chosen, mass, request.astype(np.int32), run.phase, run.token_ids)

    @abstractmethod
    def compute(self, layer: int, event: LiveEvent, which: npt.NDArray[np.bool_] | None) -> None:
        """Compute some of the event's experts, all of them resident, or all."""

    @abstractmethod
    def fetch_and_compute(self, layer: int, event: LiveEvent, loads: Loads) -> None:
        """Bring in what is missing and compute everything, residents first."""

    @abstractmethod
    def lost(self, loads: Loads) -> list[int]:
        """After a failure: the experts whose slots hold nothing to be trusted."""

    @abstractmethod
    def resident_bytes(self) -> dict[str, int]:
        """The bytes held, by what for."""

    @abstractmethod
    def close(self) -> None:
        """Give back threads, files and memory."""


def refuse_training(module: torch.nn.Module) -> None:
    """Gradients through weights that come and go would be silently wrong."""
    if module.training and torch.is_grad_enabled():
        raise ModelError("hotset runs models, it does not train them: call model.eval() first")
