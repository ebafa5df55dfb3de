"""Gemma 4: behind the experts interface; experts and router take the same state through norms of their own."""

from __future__ import annotations

import torch

from hotset.models import interface
from hotset.models.layers import MoeLayer, RouterTraits

CLASSES = ("Gemma4TextExperts", "DiffusionGemmaTextExperts")


def moe_layer_of(name: str, module: torch.nn.Module, model: torch.nn.Module) -> MoeLayer:
    """Describe one experts module."""
    return interface.moe_layer_of(name, module, model, RouterTraits(experts_norm="pre_feedforward_layernorm_2"))
