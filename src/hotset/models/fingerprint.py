"""Which model this is: its architecture, and a digest of the routers, for they decide what a profile means."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hotset.errors import ModelError
from hotset.models.lean import LeanLoad, lean_loading
from hotset.models.own_code import refusing_own_code
from hotset.models.packed import check_if_packed
from hotset.models.plausible import refuse_absurd_sizes
from hotset.models.quantised import dequantising
from hotset.models.site import Site
from hotset.profile import Fingerprint

_MOST_BYTES = 1 << 22


def fingerprint_of(model: Any, sites: Sequence[Site]) -> Fingerprint:
    """The fingerprint of a loaded model; the same in every dtype that keeps a bfloat16 number."""
    architecture = (getattr(model.config, "architectures", None) or [type(model).__name__])[0]
    digest = hashlib.blake2b(digest_size=16)
    for site in {0: sites[0], 1: sites[len(sites) // 2], 2: sites[-1]}.values():
        for name, tensor in _routers(model, site):
            plain = tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy()
            digest.update(f"{name.rpartition('.')[2]} {tuple(tensor.shape)}\n".encode())
            digest.update(plain.tobytes()[:_MOST_BYTES])
    return Fingerprint(str(architecture), digest.hexdigest())


def fingerprint_of_folder(path: str | Path, *, trust_remote_code: bool = False) -> Fingerprint:
    """The fingerprint of a checkpoint; its experts are not read."""
    from transformers import AutoModelForCausalLM

    lean = LeanLoad(keep=lambda *_: False)
    check_if_packed(Path(path))
    refuse_absurd_sizes(str(path))
    options = {"dtype": "auto", "trust_remote_code": trust_remote_code}
    with refusing_own_code(str(path)):
        extra, _ = dequantising(str(path), options)
        with lean_loading(lean):
            model = AutoModelForCausalLM.from_pretrained(str(path), **(options | extra))
    if not lean.sites:
        raise ModelError(f"{path} was not loaded from safetensors files: save it once with save_pretrained")
    return fingerprint_of(model, lean.sites)


def _routers(model: Any, site: Site) -> list[tuple[str, torch.Tensor]]:
    """The small tensors beside a layer's experts that have a row or a column for each of them; else all small ones."""
    experts = set(site.parameters())
    parent = site.name.rpartition(".")[0]
    beside = [
        (name, parameter)
        for name, parameter in model.get_submodule(parent).named_parameters()
        if (f"{parent}.{name}" if parent else name) not in experts and not parameter.is_meta
    ]
    return [(name, tensor) for name, tensor in beside if site.experts in tensor.shape] or beside
