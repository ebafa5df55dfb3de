"""Saliency on disk: a safetensors file of its sums, with the fingerprint of the model they are of."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hotset.analysis.saliency import Saliency
from hotset.errors import HotsetError
from hotset.files import write_beside
from hotset.profile import Fingerprint
from hotset.reading import header_bytes, open_regular

KIND, VERSION = "saliency", 1
MAX_HEADER_BYTES = 1 << 20
MAX_VALUES = 1 << 26
"""More sums than any model has experts for."""
_TENSORS = {"sums": "F64", "largest": "F64", "tokens": "I64"}


def save_saliency(saliency: Saliency, path: Path) -> None:
    """Write it, whole or not at all."""
    from safetensors.numpy import save_file

    header = {"kind": KIND, "version": VERSION, "fingerprint": asdict(saliency.fingerprint), "meta": saliency.meta}
    tensors = {name: getattr(saliency, name) for name in _TENSORS}
    with write_beside(path) as scratch:
        save_file(tensors, scratch, {"hotset": json.dumps(header, sort_keys=True)})


def load_saliency(path: Path) -> Saliency:
    """Read what was saved; any other file raises HotsetError."""
    from safetensors import SafetensorError, safe_open

    try:
        with open_regular(path):
            header_bytes(path, MAX_HEADER_BYTES)
        with safe_open(path, framework="np") as file:
            header = _header(file.metadata() or {})
            _check(file)
            return Saliency(**{name: file.get_tensor(name) for name in _TENSORS}, **header)
    except OSError as error:
        raise HotsetError(f"cannot read {path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise HotsetError(
            f"{path} holds no saliency, or is damaged: hotset prune --save-saliency FILE records one"
        ) from error
    except HotsetError as error:
        raise HotsetError(f"{path}: {error}") from None


def _header(metadata: dict[str, str]) -> dict[str, Any]:
    header = json.loads(metadata["hotset"])
    if header["kind"] != KIND:
        raise HotsetError(f"a {header['kind']!s:.20}, and no saliency: --saliency takes what --save-saliency wrote")
    if header["version"] != VERSION:
        raise HotsetError(f"saliency of format {header['version']!s:.20}, and this hotset reads {VERSION}: record anew")
    words = header["fingerprint"] | header["meta"]
    if not all(isinstance(value, str) for value in words.values()):
        raise ValueError(words)
    return {"fingerprint": Fingerprint(**header["fingerprint"]), "meta": header["meta"]}


def _check(file: Any) -> None:
    """Refuse wrong types and sizes before anything is allocated."""
    for name, dtype in _TENSORS.items():
        stored, size = file.get_slice(name), 1
        for side in stored.get_shape():
            size *= side
        if stored.get_dtype() != dtype or size > MAX_VALUES or len(stored.get_shape()) > 4:
            raise ValueError(name)
    if len(file.get_slice("largest").get_shape()) != 3 or len(file.get_slice("sums").get_shape()) != 4:
        raise ValueError("shape")
