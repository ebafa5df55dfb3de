"""Models that were used or packed here, by name, and those of the hub's cache: a name is enough the next time."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hotset.errors import HotsetError
from hotset.files import write_beside
from hotset.profile.folder import folder as profiles_folder
from hotset.reading import read_bounded

MAX_KNOWN = 1000
REFERENCE = "reference"
_MAX_BYTES = 1 << 20
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".hotset")
PRECISIONS = {
    "dense": "bfloat16", "dense:dtype=float16": "float16", "dense:dtype=float32": "float32",
    "integer:bits=8": "int8", "integer:short=on": "int4",
}  # fmt: skip
"""What people call the weight formats of packs; all others by their own names."""


@dataclass(frozen=True)
class KnownModel:
    """A model on this machine: its name, where it is, and what its files say of it."""

    name: str
    place: str
    kind: str  # "ships with hotset", "used here", "packed" or "hub cache"
    size_bytes: int
    precision: str
    mixture_of_experts: bool | None  # None: its files do not say at once


def is_temporary(place: str) -> bool:
    """Whether a model is where things are deleted, so that it may not be there the next time."""
    return Path(place).absolute().is_relative_to(tempfile.gettempdir())


def remember(place: str) -> None:
    """Keep the place of a model under its name, but of a temporary one; what cannot be written is not kept."""
    path = Path(place).absolute()
    if is_temporary(place):
        return
    known = {name: each for name, each in _read().items() if Path(each).exists()}
    if not path.exists() or known.get(name_of(place)) == str(path):
        return
    kept = dict(list(known.items())[-MAX_KNOWN:]) | {name_of(place): str(path)}
    with suppress(OSError, HotsetError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        with write_beside(_file()) as scratch:
            scratch.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def find(name: str) -> str | None:
    """The place of a model that was used here, or the hub id of one in the hub's cache, by its name."""
    if name == REFERENCE:
        from hotset.reference import path as reference_path

        return str(reference_path())
    place = _read().get(name)
    if place is not None and Path(place).exists():
        return place
    found = [model.name for model in _hub() if model.name.rpartition("/")[2] == name]
    return found[0] if len(found) == 1 else None


def missing(name: str) -> str:
    """What to say of a name that leads to no model: where one of that name was, or which name is near."""
    known = _read()
    if name in known:
        return f"{name} was used from {known[name]}, which is not there any more: give the folder that it is in now"
    hub = {model.name: model.name.rpartition("/")[2] for model in _hub()}
    if len(alike := [full for full, short in hub.items() if short == name]) > 1:
        return f"there is more than one {name} in the hub's cache: name one of {', '.join(alike)}"
    if near := get_close_matches(name, [REFERENCE, *known, *hub.values()], n=1):
        return f"there is no folder or model {name}: did you mean {near[0]}? hotset models lists all"
    return (
        f"there is no folder {name}: give a folder with a model, a hub id such as org/name, or a name that "
        "hotset models lists"
    )


def all_models() -> list[KnownModel]:
    """The model that ships with hotset, those that were used or packed here, and those of the hub's cache."""
    from hotset.reference import path as reference_path
    from hotset.store.packed import is_packed

    used = []
    for name, place in sorted(_read().items()):
        path = Path(place)
        if path.exists():
            used.append(_described(name, path, "packed" if is_packed(path) else "used here"))
    return [_described(REFERENCE, reference_path(), "ships with hotset"), *used, *_hub()]


def name_of(place: str) -> str:
    """What a model of a folder or a file is called."""
    path = Path(place).absolute()
    return path.name if path.is_dir() else path.stem


def _hub() -> Iterator[KnownModel]:
    """What is in the hub's cache, by the layout of its folders: models--org--name/snapshots/COMMIT."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return
    for repo in sorted(Path(HF_HUB_CACHE).glob("models--*--*")):
        snapshots = sorted((repo / "snapshots").glob("*/config.json"), key=lambda file: file.stat().st_mtime)
        if snapshots:
            name = "/".join(repo.name.removeprefix("models--").split("--", 1))
            yield _described(name, snapshots[-1].parent, "hub cache")


def _described(name: str, path: Path, kind: str) -> KnownModel:
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.name.endswith(_WEIGHTS)]
    size = sum(file.stat().st_size for file in files if file.exists())
    if path.is_file():
        return KnownModel(name, str(path), kind, size, _gguf_precision(path), None)
    config = _config(path)
    return KnownModel(name, str(path), kind, size, _precision(config, path), _has_experts(config))


def _config(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_bounded(path / "config.json", _MAX_BYTES))
        return found if isinstance(found, dict) else {}
    return {}


def _precision(config: dict[str, Any], path: Path) -> str:
    from hotset.store.packed import INDEX_FILE, is_packed, open_index

    if is_packed(path) and (path / INDEX_FILE).is_file():
        with suppress(HotsetError):
            plan = open_index(path).plan
            formats = sorted({matrix.format for layer in plan.layers for matrix in layer.layout.matrices})
            return ", ".join(PRECISIONS.get(each, each) for each in formats) or plan.meta.get("dtype", "unknown")
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    quantised = config.get("quantization_config")
    if isinstance(quantised, dict) and quantised.get("quant_method"):
        return str(quantised["quant_method"])
    found = (each.get(key) for each in (config, text or {}) for key in ("dtype", "torch_dtype"))
    return str(next((each for each in found if each), "unknown"))


def _gguf_precision(path: Path) -> str:
    """GGUF files are named by their precision: NAME-Q4_K_M.gguf."""
    return f"GGUF {path.stem.rpartition('-')[2]}"


def _has_experts(config: dict[str, Any]) -> bool | None:
    """Whether a config states a number of experts."""
    if not config:
        return None
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    return any(
        "expert" in key and isinstance(value, int) and value > 1 for part in parts for key, value in part.items()
    )


def _file() -> Path:
    return profiles_folder().parent / "models.json"


def _read() -> dict[str, str]:
    """What is known by name; a file that is damaged is as none."""
    with suppress(OSError, ValueError, RecursionError, HotsetError):
        found = json.loads(read_bounded(_file(), _MAX_BYTES))
        if isinstance(found, dict):
            return {str(name): str(place) for name, place in found.items() if os.path.isabs(str(place))}
    return {}
