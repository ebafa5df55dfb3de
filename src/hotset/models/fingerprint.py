"""Which model this is: its architecture, and a digest of the routers, for they decide what a profile means."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hotset.errors import ModelError
from hotset.models.deferred import DeferredExperts
from hotset.models.gguf_place import located
from hotset.models.layers import MoeLayer
from hotset.models.pretrained import read_model
from hotset.profile import Fingerprint

_MAX_BYTES = 1 << 22


def fingerprint_of(model: Any, moe_layers: Sequence[MoeLayer]) -> Fingerprint:
    """The fingerprint of a loaded model; the same in every dtype that keeps a bfloat16 number."""
    architecture = (getattr(model.config, "architectures", None) or [type(model).__name__])[0]
    digest = hashlib.blake2b(digest_size=16)
    for moe_layer in {0: moe_layers[0], 1: moe_layers[len(moe_layers) // 2], 2: moe_layers[-1]}.values():
        for name, tensor in _routers(model, moe_layer):
            plain = tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy()
            digest.update(f"{name.rpartition('.')[2]} {tuple(tensor.shape)}\n".encode())
            digest.update(plain.tobytes()[:_MAX_BYTES])
    return Fingerprint(str(architecture), digest.hexdigest())


def fingerprint_of_folder(path: str | Path, *, trust_remote_code: bool = False) -> Fingerprint:
    """The fingerprint of a checkpoint; its experts are not read."""
    deferred = DeferredExperts(keep=lambda *_: False)
    place = located(str(path)) or str(path)
    model = read_model(place, deferred, {"dtype": "auto", "trust_remote_code": trust_remote_code})
    if not deferred.moe_layers:
        raise ModelError(f"{path} was not loaded from safetensors files: save it once with save_pretrained")
    return fingerprint_of(model, deferred.moe_layers)


def _routers(model: Any, moe_layer: MoeLayer) -> list[tuple[str, torch.Tensor]]:
    """The small tensors beside a layer's experts that have a row or a column for each of them; else all small ones."""
    experts = set(moe_layer.parameters())
    parent = moe_layer.name.rpartition(".")[0]
    beside = [
        (name, parameter)
        for name, parameter in model.get_submodule(parent).named_parameters()
        if (f"{parent}.{name}" if parent else name) not in experts and not parameter.is_meta
    ]
    return [(name, tensor) for name, tensor in beside if moe_layer.experts in tensor.shape] or beside
