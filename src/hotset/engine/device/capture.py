"""Records a decode step into a graph, which is then only replayed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hotset.engine.device.step_kernels import StepKernels
from hotset.engine.device.variant import Variant
from hotset.engine.driver import Driver
from hotset.engine.step import Step

Tensor = torch.Tensor

Forward = Callable[[Driver], Any]
"""Runs the model's forward once, with a driver that serves its MoE layers; returns its outputs."""

WARM_UPS = 2
"""Runs before a capture: kernels are compiled, tuned and given their scratch memory."""
MAX_GRAPHS = 16
MAX_IN_A_ROW = 8


@dataclass
class CapturedStep:
    """One graph, the inputs that it reads and the outputs that it writes, and whose memory it was made for."""

    graph: Any
    inputs: dict[str, Tensor]
    outputs: Any
    kernels: StepKernels
    variant: Variant
    cache: Callable[[], Any]  # the key-value cache, as long as it is alive
    is_fresh: bool = True  # the first launch of a graph takes longer


class WarmUp:
    """The driver of a run before a capture: each layer runs all its kernels, and asks for no expert."""

    def __init__(self, kernels: StepKernels, variant: Variant) -> None:
        self.kernels, self.variant = kernels, variant

    def serve(self, step: Step, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:  # noqa: ARG002
        """Compile and tune the kernels of a layer."""
        return self.kernels.warm_up(self.variant, layer, hidden, index, weights)


class Capture:
    """The driver of a step that is captured: what its layers reach puts kernels into the graph.

    `forward` runs the model with its layers served by a driver; `rewind` undoes what a run did to the inputs.
    """

    def __init__(self, kernels: StepKernels, variant: Variant, forward: Forward, rewind: Callable[[], None]) -> None:
        self.kernels, self.variant, self._forward, self._rewind = kernels, variant, forward, rewind

    def serve(self, step: Step, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:  # noqa: ARG002
        """Put the kernels of a layer into the graph."""
        return self.kernels.emit(self.variant, layer, hidden, index, weights)

    def record(self, pool: Any = None) -> tuple[Any, Any]:
        """A graph of the step, with its memory in a pool, and the outputs that it writes; nothing is served yet."""
        try:
            with side_stream(self.kernels.device):
                for _ in range(WARM_UPS):
                    self._rewind()  # there may be room for one token more, and not for two
                    self._run(WarmUp(self.kernels, self.variant))
            self._rewind()
            return recorded(self, pool)
        finally:
            if self.kernels.device.type == "cuda":  # where it failed, something may still run
                torch.cuda.synchronize(self.kernels.device)
            self._rewind()
            self.kernels.restart()

    def run(self) -> Any:
        """Run the step with its layers emitted, while the calling thread captures."""
        return self._run(self)

    def _run(self, driver: Driver) -> Any:
        log = self.kernels.log
        log.begin(self.variant)
        outputs = self._forward(driver)
        log.send(self.variant)
        return outputs


def recorded(capture: Capture, pool: Any) -> tuple[Any, Any]:
    """The graph of a step, and the outputs that it writes; nothing runs yet."""
    cuda: Any = torch.cuda
    graph = cuda.CUDAGraph()
    # Other threads may use the device meanwhile: what they do is not part of it.
    stream = capture.kernels.another_stream()  # torch's own for this is of the device that was captured on first
    with (
        _without_garbage_collection(),
        cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
    ):
        outputs = capture.run()
    return graph, outputs


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Collect garbage first, and none inside: a model that was dropped waits for the device, which ends a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """A stream of its own, as what comes before a capture must have; a device without streams needs none."""
    if device.type != "cuda":
        yield
        return
    cuda: Any = torch.cuda
    stream = cuda.Stream(device)
    stream.wait_stream(cuda.current_stream(device))
    try:
        with cuda.stream(stream):
            yield
    finally:
        cuda.current_stream(device).wait_stream(stream)


class CapturedSteps:
    """The graphs of one model, by what they were captured for; the one that was used longest ago goes first."""

    def __init__(self) -> None:
        self._held: dict[Any, CapturedStep] = {}
        self._in_a_row = 0  # captures, and calls that would have been some, since a graph was used again

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[CapturedStep]:
        return iter(self._held.values())

    def find(self, key: Any, cache: Any) -> CapturedStep | None:
        """The graph of this key, if it was captured with this key-value cache."""
        found = self._held.pop(key, None)
        if found is None or found.cache() is not cache:
            return None
        self._in_a_row = 0
        self._held[key] = found  # as the one used last
        return found

    def is_worth_it(self) -> bool:
        """Whether to capture: not if one call after another needs a graph of its own, as with masks that grow."""
        self._in_a_row += 1
        return self._in_a_row <= MAX_IN_A_ROW or self._in_a_row % 64 == 0

    def make_room(self) -> None:
        """Let graphs go whose cache is gone, and as many more as keep their number bounded."""
        self._held = {key: one for key, one in self._held.items() if one.cache() is not None}
        while len(self._held) >= MAX_GRAPHS:
            del self._held[next(iter(self._held))]

    def add(self, key: Any, captured: CapturedStep) -> None:
        """Keep a graph."""
        self._held[key] = captured

    def clear(self) -> None:
        """Let all go."""
        self._held.clear()

    def pool(self, device: torch.device) -> Any:
        """The memory of all graphs, since only one of them runs at a time; a new one where no graph uses it any more.

        With its last graph torch gives up a pool, though outputs of that graph may still lie in it.
        """
        if device.type != "cuda":
            return None
        alive = next(iter(self), None)
        return torch.cuda.graph_pool_handle() if alive is None else alive.graph.pool()
