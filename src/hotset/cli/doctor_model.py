"""What a model needs: read from its config and the headers of its files, without loading a weight."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotset.models.pretrained import Inspected


def needs(name: str, found: Inspected) -> dict[str, Any]:
    """The sizes that a person decides by."""
    from hotset.cache.plan import Scope
    from hotset.models.account import take_account
    from hotset.models.budget import SAFETY, least_slots, shape_of
    from hotset.models.device import torch_device
    from hotset.options.run import AUTO, CONTEXT_TOKENS

    shape = shape_of(found.moe_layers, found.catalog)
    account = take_account(found.model, torch_device(AUTO), shape.top_k, context=CONTEXT_TOKENS)
    least, size = max(least_slots(shape, Scope.LAYER), shape.top_k), shape.expert_bytes or 0
    total, auto = shape.total_experts * size, int(account.expert_bytes * (1 - SAFETY))
    return {
        "model": name,
        "family": found.model.config.model_type,
        "layers": shape.layers,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "expert_bytes": size,
        "all_experts_bytes": total,
        "dense_bytes": account.dense_bytes,
        "quarter_bytes": shape.total_experts // 4 * size,
        "cycle_bytes": shape.token_cycle * size,
        "least_slots": least,
        "least_bytes": (least + 1) * size,  # one slot at least is for staging
        "auto_bytes": min(auto, total),
        "fits": total <= auto,
        "host_only": _host_only(found),
        "pack": _pack(found.catalog.files[0].parent),
    }


def _pack(folder: Path) -> dict[str, Any] | None:
    """What a packed model says of itself: its experts' formats, what they were calibrated on, and their quality."""
    from hotset.store.packed import is_packed, open_index

    if not is_packed(folder):
        return None
    index = open_index(folder)
    matrices = [matrix for layer in index.plan.layers for matrix in layer.layout.matrices]
    return {
        "formats": sorted({matrix.format for matrix in matrices}) or [index.plan.meta.get("dtype", "")],
        "calibration": index.plan.meta.get("calibration"),
        "quality": index.quality,
    }


def _host_only(found: Inspected) -> str | None:
    """What keeps a device from driving these experts by the default policy; nothing where there is none to ask."""
    import torch

    if not torch.cuda.is_available():
        return None
    from hotset.cache.plan import Scope
    from hotset.engine.support import DeviceSupport
    from hotset.options import RunOptions
    from hotset.policies import parse

    layers = [
        (moe_layer.spec, source.layout)
        for moe_layer, source in zip(found.moe_layers, found.catalog.layers, strict=True)
    ]
    reasons = DeviceSupport.check(
        parse(RunOptions().policy),
        Scope(RunOptions().scope),
        layers,
        encoder_decoder=bool(getattr(found.model.config, "is_encoder_decoder", False)),
    )
    return reasons[0] if reasons else None
