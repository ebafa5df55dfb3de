"""Finds the experts of a model, in the order in which the model runs them."""

from __future__ import annotations

import torch

from hotset.errors import ModelError
from hotset.models import interface
from hotset.models.adapters import adapter_for
from hotset.models.adapters._unsupported import refuse_unsupported
from hotset.models.site import Site


def find_sites(model: torch.nn.Module) -> list[Site]:
    """All places where experts work; a model without any, or with ones that cannot be served, raises ModelError."""
    sites = []
    for name, module in model.named_modules():
        refuse_unsupported(name, module)
        adapter = adapter_for(module)
        if adapter is not None:
            sites.append(adapter.site_of(name, module, model))
        elif interface.is_experts(module):
            sites.append(interface.site_of(name, module, model))
    if not sites:
        raise ModelError(
            f"{type(model).__name__} has no experts that hotset knows: it is a dense model, or a family that is not "
            "supported; plain transformers runs it"
        )
    return sites
