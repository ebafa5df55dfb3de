"""What a model needs: read from its config and the headers of its files, without loading a weight."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Found:
    """What loading found out before it was stopped."""

    shape: Any
    dense_bytes: int
    free_bytes: int
    files: tuple[Path, ...]
    family: str
    host_only: str | None = None  # why a device cannot drive its experts


class _InspectedError(Exception):
    pass


def inspect_model(place: str, trust_remote_code: bool = False) -> Found:
    """Begin to load a model, and stop where its experts are known and nothing has been read."""
    from hotset.models.deferred import DeferredExperts
    from hotset.models.pretrained import read_model

    found: list[Found] = []

    def stop(model: Any, moe_layers: Any, catalog: Any) -> bool:
        found.append(_found(model, moe_layers, catalog))
        raise _InspectedError

    try:
        read_model(place, DeferredExperts(keep=stop), {"dtype": "auto", "trust_remote_code": trust_remote_code})
    except _InspectedError:
        return found[0]
    from hotset.errors import ModelError

    raise ModelError(f"{place} has no safetensors files: save it once with save_pretrained")


def _found(model: Any, moe_layers: Any, catalog: Any) -> Found:
    from hotset.models.account import take_account
    from hotset.models.budget import shape_of
    from hotset.models.device import torch_device
    from hotset.options.run import AUTO, CONTEXT_TOKENS

    shape = shape_of(moe_layers, catalog)
    account = take_account(model, torch_device(AUTO), shape.top_k, context=CONTEXT_TOKENS)
    return Found(
        shape,
        account.dense_bytes,
        account.expert_bytes,
        catalog.files,
        model.config.model_type,
        _host_only(moe_layers, catalog),
    )


def _host_only(moe_layers: Any, catalog: Any) -> str | None:
    """What keeps a device from driving these experts by the default policy; nothing where there is none to ask."""
    import torch

    if not torch.cuda.is_available():
        return None
    from hotset.cache.plan import Scope
    from hotset.engine.support import DeviceSupport
    from hotset.options import RunOptions
    from hotset.policies import parse

    layers = [(moe_layer.spec, source.layout) for moe_layer, source in zip(moe_layers, catalog.layers, strict=True)]
    reasons = DeviceSupport.check(parse(RunOptions().policy), Scope(RunOptions().scope), layers)
    return reasons[0] if reasons else None


def needs(name: str, found: Found) -> dict[str, Any]:
    """The sizes that a person decides by."""
    from hotset.cache.plan import Scope
    from hotset.models.budget import SAFETY, least_slots

    shape = found.shape
    least = max(least_slots(shape, Scope.LAYER), shape.top_k)
    total = shape.total_experts * shape.expert_bytes
    auto = int(found.free_bytes * (1 - SAFETY))
    return {
        "model": name,
        "family": found.family,
        "layers": shape.layers,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "expert_bytes": shape.expert_bytes,
        "all_experts_bytes": total,
        "dense_bytes": found.dense_bytes,
        "quarter_bytes": shape.total_experts // 4 * shape.expert_bytes,
        "cycle_bytes": shape.token_cycle * shape.expert_bytes,
        "least_slots": least,
        "least_bytes": (least + 1) * shape.expert_bytes,  # one slot at least is for staging
        "auto_bytes": min(auto, total),
        "fits": total <= auto,
        "host_only": found.host_only,
        "pack": _pack(found.files[0].parent),
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


def largest_file(found: Found) -> Path:
    """The file that tells most about the disk."""
    return max(found.files, key=lambda path: path.stat().st_size)
