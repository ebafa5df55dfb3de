"""What stays of a parameter that was taken out of a model: its shape, and all that is needed to put it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotset.models.patches import take_parameter
from hotset.models.site import Site


@dataclass
class Shell:
    """One parameter of a model without its memory."""

    name: str
    parameter: torch.nn.Parameter
    put_back: Callable[[torch.nn.Parameter], None]
    rest: torch.Tensor | None  # rows that belong to no expert

    def put_rest(self, whole: torch.Tensor) -> None:
        """Copy in the rows that belong to no expert; they are the last."""
        if self.rest is not None:
            whole[len(whole) - len(self.rest) :] = self.rest

    def fill(self, whole: torch.Tensor) -> None:
        """Put the parameter back where it was, with these values."""
        fresh = whole.to(self.parameter.device) if self.parameter.device.type != "meta" else whole
        if self.parameter.device.type == "meta":
            self.parameter = torch.nn.Parameter(fresh, requires_grad=self.parameter.requires_grad)
        else:
            self.parameter.data = fresh
        self.put_back(self.parameter)


def strip(model: Any, sites: Sequence[Site]) -> list[Shell]:
    """Replace the experts' parameters by shapes without memory, which neither loader nor initialiser touches."""
    shells = []
    for site in sites:
        site.module._is_hf_initialized = True  # type: ignore[assignment]
        used = dict.fromkeys(site.parameters(), 0)
        for take in (take for part in site.parts for e in range(site.experts) for take in part.takes(e)):
            used[take.parameter] = max(used[take.parameter], take.last)
        shells += [_empty(model, name, last) for name, last in used.items()]
    return shells


def _empty(model: Any, name: str, used_rows: int) -> Shell:
    path, _, leaf = name.rpartition(".")
    module: torch.nn.Module = model.get_submodule(path)
    parameter = module.get_parameter(leaf)
    spare = parameter.device.type != "meta" and used_rows < len(parameter)
    rest = parameter.data[used_rows:].clone() if spare else None
    hollow = torch.empty_like(parameter, device="meta", requires_grad=False)
    hollow._is_hf_initialized = True  # type: ignore[attr-defined]
    shell = Shell(name, parameter, take_parameter(module, leaf, hollow), rest)
    module._is_hf_initialized = True  # type: ignore[assignment]  # as transformers marks all that it has initialised
    if parameter.device.type != "meta":
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return shell
