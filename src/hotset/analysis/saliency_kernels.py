"""Kernels that compute experts as usual and add up what their outputs are: saliency as a model runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotset.analysis.router_margins import MarginRecorder
from hotset.analysis.saliency import Grid, Saliency
from hotset.compiling import keep_compiled
from hotset.engine.arena import Arena
from hotset.engine.batch import BatchOutput, ExpertBatch, IntArray
from hotset.engine.kernels import ExpertKernels, ExpertSpec
from hotset.engine.kernels.cpu import PerExpertKernels
from hotset.engine.step import Step
from hotset.errors import HotsetError, ModelError
from hotset.models.layers import MoeLayer
from hotset.store import SlotLayout

Tensor = torch.Tensor
Rows = npt.NDArray[np.float32]
FEW_PAIRS = 64
"""Of a whole event: what arrives together must not decide over how norms are rounded."""
_GATED_INPUTS = {"Llama4TextMoe"}
"""Modules whose gate scales what an expert is given: their outputs without it are never computed."""


class SaliencyRecorder:
    """Gives a model kernels that observe its experts, and keeps what they add up.

    `load_model(..., kernels=recorder.kernels)`, then `recorder.begin(model)`: from there on every forward call counts.
    """

    def __init__(self, *, margins: bool = False) -> None:
        self.margins: MarginRecorder | None = None  # of the routers, where they are asked for
        self._wants_margins = margins
        self._layers: list[SaliencyKernels] = []
        self._saliency: Saliency | None = None
        self._step: Callable[[], Step] = _no_step
        self._last_step = 0

    def kernels(self, arena: Arena, layout: SlotLayout, spec: ExpertSpec, _: int) -> ExpertKernels:
        """Kernels of the next layer."""
        made = SaliencyKernels(arena, layout, spec, self, len(self._layers))
        self._layers.append(made)
        return made

    def begin(self, model: Any, meta: dict[str, str], earlier: Saliency | None = None) -> Saliency:
        """Add up from here on, to what an earlier run has come to if there is one."""
        handle = model.hotset
        moe_layers: list[MoeLayer] = handle.moe_layers
        check_gates(moe_layers)
        experts = {moe_layer.experts for moe_layer in moe_layers}
        if len(experts) != 1 or len(self._layers) != len(moe_layers):
            raise ModelError("the layers of this model have different numbers of experts: saliency is not recorded")
        self._saliency = Saliency.empty(handle.fingerprint, len(moe_layers), experts.pop(), meta)
        if earlier is not None:
            earlier.check(handle.fingerprint, self._saliency.layers, self._saliency.experts)
            for name in ("sums", "largest", "tokens"):
                getattr(self._saliency, name)[...] = getattr(earlier, name)
        if self._wants_margins:
            self.margins = MarginRecorder(model, moe_layers)
        self._step = handle.tracker.current
        model.register_forward_pre_hook(_refuse_padding, with_kwargs=True)
        return self._saliency

    def see(self, layer: int, batch: ExpertBatch) -> None:
        """Take in what a layer's router chose, before its experts are computed."""
        if self.margins is not None:
            self.margins.see(layer, batch)

    def add(self, layer: int, experts: IntArray, gates: Tensor, results: Tensor, *, few: bool) -> None:
        """Take in what experts made of a row each, before it is weighted by its gate."""
        saliency = self._saliency
        if saliency is None:
            return
        step = self._step()
        if step.number != self._last_step:
            self._last_step = step.number
            saliency.tokens[step.phase] += step.batch * step.length
        sums, largest = saliency.sums[:, step.phase, layer], saliency.largest[step.phase, layer]
        rows, weights = results.detach().float(), gates.detach().float()
        if few and rows.is_cpu:  # a call of torch costs more than the work
            add_few(rows.numpy(), weights.numpy(), experts, sums, largest)
        else:
            add_many(rows, weights, experts, sums, largest)


@keep_compiled(nogil=True, error_model="numpy")
def add_few(rows: Rows, gates: Rows, experts: IntArray, sums: Grid, largest: Grid) -> None:
    """Add 1, g, ||f||, ||f||^2 and g ||f|| of rows to the sums [5, experts] of their experts, and the largest |f|."""
    for row in range(rows.shape[0]):
        square = peak = 0.0
        for column in range(rows.shape[1]):
            value = np.float64(rows[row, column])
            square += value * value
            peak = max(peak, abs(value))
        expert, gate, norm = experts[row], np.float64(gates[row]), np.sqrt(square)
        sums[0, expert] += 1
        sums[1, expert] += gate
        sums[2, expert] += norm
        sums[3, expert] += norm * norm
        sums[4, expert] += gate * norm
        largest[expert] = max(largest[expert], peak)


def add_many(rows: Tensor, gates: Tensor, experts: IntArray, sums: Grid, largest: Grid) -> None:
    """The same for many rows, on any device."""
    peaks, norms = torch.maximum(rows.amax(-1), -rows.amin(-1)), torch.linalg.vector_norm(rows, dim=-1)
    gate, norm, peak = torch.stack([gates, norms, peaks]).cpu().numpy().astype(np.float64)
    for total, values in zip(sums, (np.ones_like(gate), gate, norm, norm * norm, gate * norm), strict=True):
        total += np.bincount(experts, values, len(total))
    np.maximum.at(largest, experts, peak)


class SaliencyKernels(ExpertKernels):
    """All experts of one layer, computed as usual on a CPU; a recorder is told of each row."""

    def __init__(
        self, arena: Arena, layout: SlotLayout, spec: ExpertSpec, recorder: SaliencyRecorder, layer: int
    ) -> None:
        self.spec, self._recorder, self._layer = spec, recorder, layer
        self._inner = PerExpertKernels(arena, layout, spec)

    def run(self, batch: ExpertBatch, experts: IntArray, rows: IntArray) -> None:
        """Compute some of the batch's experts."""
        self._recorder.see(self._layer, batch)
        output = batch.output
        watched: Any = _WatchedOutput(output, batch, self._recorder, self._layer)
        batch.output = watched
        try:
            self._inner.run(batch, experts, rows)
        finally:
            batch.output = output

    def differentiable(self, given: Tensor, row: int) -> Tensor:
        """What the expert in one row makes of its input, by operations that have gradients."""
        return self._inner.differentiable(given, row)


class _WatchedOutput:
    """Passes results on to the output of a batch, and tells the recorder of them."""

    def __init__(self, output: BatchOutput, batch: ExpertBatch, recorder: SaliencyRecorder, layer: int) -> None:
        self._output, self._batch, self._recorder, self._layer = output, batch, recorder, layer

    def scatter(self, places: Tensor, results: Tensor) -> None:
        self._output.scatter(places, results)
        self._add(self._batch.flat[places.cpu().numpy()], self._batch.weights.reshape(-1)[places], results)

    def set_all(self, results: Tensor) -> None:
        self._output.set_all(results)
        self._add(self._batch.flat, self._batch.weights.reshape(-1), results)

    def _add(self, experts: IntArray, gates: Tensor, results: Tensor) -> None:
        self._recorder.add(self._layer, experts, gates, results, few=len(self._batch.flat) <= FEW_PAIRS)


def check_gates(moe_layers: Sequence[MoeLayer]) -> None:
    """Refuse models whose gates hotset does not see, or that scale what an expert is given."""
    for moe_layer in moe_layers:
        if moe_layer.spec.looped:
            raise ModelError(
                "this model's own code applies the router's weights to its experts, unseen by hotset: saliency is not "
                "recorded; prune by --profile"
            )
        if type(moe_layer.module).__name__ in _GATED_INPUTS:
            raise ModelError(
                "the router of this family scales what an expert is given and not its output: saliency is not recorded"
            )


def _refuse_padding(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all()):
        raise HotsetError("saliency counts every token, and this batch has padding: run prompts of one length together")


def _no_step() -> Step:
    raise HotsetError("the recorder was not begun")
