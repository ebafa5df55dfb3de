"""The engine's heart on every device: route an event, fetch what is missing, and keep the slots honest on failure."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from hotset.cache.controller import Controller
from hotset.errors import HotsetError
from hotset.runtime.engine import Engine
from hotset.runtime.event import LiveEvent, Which
from hotset.shape import ExpertKey
from hotset.store import Catalog, SlotLayout
from hotset.store.catalog import Bytes

Tensor = torch.Tensor
Loads = npt.NDArray[np.int32]
LoadListener = Callable[[int, Loads], None]
"""Told of every event that had to load: its layer, and rows of expert, slot, layer and expert that left."""


class CachingEngine(Engine):
    """Experts under a budget; subclasses know how bytes and arithmetic are done on a device."""

    def __init__(self, controller: Controller, catalog: Catalog) -> None:
        super().__init__(controller)
        self.catalog = catalog
        self.listener: LoadListener | None = None
        self._experts = [len(layer.experts) for layer in catalog.layers]
        self._lock = threading.RLock()
        self._broken = False

    def forward(self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The output of one layer's experts for hidden [tokens, width], index and weights [tokens, top_k]."""
        if not index.numel():
            return torch.zeros_like(hidden)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.forward(layer, hidden, index, weights)
        with self._lock:
            if self._broken:
                raise HotsetError("an earlier failure left this engine unusable: load the model again")
            began = time.perf_counter()
            event = LiveEvent(hidden, index, weights, self._experts[layer])
            if len(event.experts):
                self._serve(layer, event)
            self.record(layer, index, weights)
            total = event.total()
            self.clock.experts_s += time.perf_counter() - began
            return total

    def _serve(self, layer: int, event: LiveEvent) -> None:
        self._broken = True  # an interrupt may come anywhere: from here on the slots are in order only if we say so
        missing = self.controller.route(layer, event.experts, event.counts, event.tokens, self.current.phase)
        loads = self.controller.table.loads[:missing].copy()
        try:
            if missing:
                self._fetch(layer, event, loads)
            else:
                self.compute(layer, event, None)
        except BaseException:
            self.controller.drop(ExpertKey(layer, int(expert)) for expert in self.lost(loads))
            self._broken = False
            raise
        self._broken = False

    def _fetch(self, layer: int, event: LiveEvent, loads: Loads) -> None:
        if self.listener is not None:
            self.listener(layer, loads)
        self.fetch_and_compute(layer, event, loads)

    @property
    def layouts(self) -> list[SlotLayout]:
        """How the experts of each layer lie in a slot."""
        return [layer.layout for layer in self.catalog.layers]

    @abstractmethod
    def fetch(self, layer: int, expert: int) -> Bytes:
        """The bytes of one expert as in a slot, good until the next call of anything; for use between passes."""

    @abstractmethod
    def compute(self, layer: int, event: LiveEvent, which: Which) -> None:
        """Compute some of the event's experts, all of them resident, or all."""

    @abstractmethod
    def fetch_and_compute(self, layer: int, event: LiveEvent, loads: Loads) -> None:
        """Bring in what is missing and compute everything, residents first."""

    @abstractmethod
    def lost(self, loads: Loads) -> list[int]:
        """After a failure: the experts whose slots hold nothing to be trusted."""
