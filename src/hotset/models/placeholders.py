"""What stays of a parameter that was taken out of a model: its shape, and all that is needed to put it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotset.models.layers import MoeLayer
from hotset.models.patches import take_parameter


@dataclass
class Placeholder:
    """One parameter of a model without its memory."""

    name: str
    parameter: torch.nn.Parameter
    put_back: Callable[[torch.nn.Parameter], None]
    rest: torch.Tensor | None  # rows that belong to no expert

    def fill(self, whole: torch.Tensor) -> None:
        """Put the parameter back where it was, with these values; the last rows may belong to no expert."""
        if self.rest is not None:
            whole[len(whole) - len(self.rest) :] = self.rest
        fresh = whole.to(self.parameter.device) if self.parameter.device.type != "meta" else whole
        if self.parameter.device.type == "meta":
            self.parameter = torch.nn.Parameter(fresh, requires_grad=self.parameter.requires_grad)
        else:
            self.parameter.data = fresh
        self.put_back(self.parameter)


def install_placeholders(model: Any, moe_layers: Sequence[MoeLayer]) -> list[Placeholder]:
    """Replace the experts' parameters by shapes without memory, which neither loader nor initialiser touches."""
    placeholders = []
    for moe_layer in moe_layers:
        moe_layer.module._is_hf_initialized = True  # type: ignore[assignment]
        used = dict.fromkeys(moe_layer.parameters(), 0)
        for row_range in (
            row_range for part in moe_layer.parts for e in range(moe_layer.experts) for row_range in part.row_ranges(e)
        ):
            used[row_range.parameter] = max(used[row_range.parameter], row_range.last)
        placeholders += [_empty(model, name, last) for name, last in used.items()]
    return placeholders


def _empty(model: Any, name: str, used_rows: int) -> Placeholder:
    path, _, leaf = name.rpartition(".")
    module: torch.nn.Module = model.get_submodule(path)
    parameter = module.get_parameter(leaf)
    spare = parameter.device.type != "meta" and used_rows < len(parameter)
    rest = parameter.data[used_rows:].clone() if spare else None
    meta_tensor = torch.empty_like(parameter, device="meta", requires_grad=False)
    meta_tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    placeholder = Placeholder(name, parameter, take_parameter(module, leaf, meta_tensor), rest)
    module._is_hf_initialized = True  # type: ignore[assignment]  # as transformers marks all that it has initialised
    if parameter.device.type != "meta":
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return placeholder
