"""The sums of saliency by a slow, independent computation: the stock model, one expert and one token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.functional import silu

from hotset.trace import Phase


def one_expert(module: Any, expert: int, row: torch.Tensor) -> torch.Tensor:
    """What one expert makes of one row, in float64, by the published formulas."""
    weight = {name: value[expert].double() for name, value in module.named_parameters()}
    if "gate_up_proj_bias" in weight:  # gpt-oss: interleaved, clamped, with biases
        both = row @ weight["gate_up_proj"] + weight["gate_up_proj_bias"]
        gate, up = both[::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
        inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        return inner @ weight["down_proj"] + weight["down_proj_bias"]
    gate, up = (weight["gate_up_proj"] @ row).chunk(2)
    return weight["down_proj"] @ (silu(gate) * up)


class SlowSaliency:
    """Adds up, of a stock model, what `Saliency` adds up of one that runs under hotset."""

    def __init__(self, model: Any, modules: list[str], experts: int) -> None:
        self.sums = np.zeros((5, len(Phase), len(modules), experts))
        self.largest = np.zeros((len(Phase), len(modules), experts))
        self.phase = Phase.PREFILL
        for layer, name in enumerate(modules):
            hook = self._hook(layer)
            model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)

    def _hook(self, layer: int) -> Any:
        def look(module: Any, args: Any, kwargs: Any) -> None:
            hidden, index, weights = [*args, *kwargs.values()][:3]
            for row, chosen, gates in zip(hidden.reshape(-1, hidden.shape[-1]), index, weights, strict=True):
                for expert, gate in zip(chosen.tolist(), gates.tolist(), strict=True):
                    self._add(layer, expert, gate, one_expert(module, expert, row.double()))

        return look

    def _add(self, layer: int, expert: int, gate: float, out: torch.Tensor) -> None:
        norm = float(out.square().sum().sqrt())
        self.sums[:, self.phase, layer, expert] += 1, gate, norm, norm**2, gate * norm
        at = (self.phase, layer, expert)
        self.largest[at] = max(self.largest[at], float(out.abs().max()))
