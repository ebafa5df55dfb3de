"""The small files of a pack: everything beside the weights that makes a folder a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hotset.store.inside import check_inside
from hotset.store.packed import BLOCKS_FILE, INDEX_FILE

LARGEST_COPY = 256 << 20
WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".ot",
    ".index.json", ".hotset",
)  # fmt: skip
FOLDERS = ("additional_chat_templates",)


def source_folder(model: str) -> Path:
    """Where the small files of a model are: its folder, or the local copy of what the hub has."""
    if Path(model).is_dir():
        return Path(model).absolute()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, ignore_patterns=[f"*{suffix}" for suffix in WEIGHTS]))


def small_files(source: Path) -> list[Path]:
    """Everything small that makes a folder a model: config, tokenizer, templates, code; links out of it are refused."""
    folders = [source, *(source / name for name in FOLDERS if (source / name).is_dir())]
    found = [file for folder in folders for file in sorted(folder.iterdir()) if _belongs(file)]
    check_inside(source, found)
    return found


def _belongs(file: Path) -> bool:
    if not file.is_file() or file.name.startswith(".") or file.name in (INDEX_FILE, BLOCKS_FILE):
        return False
    return not file.name.endswith(WEIGHTS) and file.stat().st_size <= LARGEST_COPY


def packed_config(text: bytes, dtype: str) -> bytes:
    """The config, saying how the experts were packed, so that a plain load takes the rest of the model alike."""
    config = json.loads(text)
    named = config.pop("transformers_weights", None)  # a file that is not in this folder
    if not named and _dtype_in(config) == dtype:
        return text
    nested = [value for value in config.values() if isinstance(value, dict) and _dtype_in(value)]
    for section in (config, *nested):
        section.pop("torch_dtype", None)
        section["dtype"] = dtype
    return (json.dumps(config, indent=2) + "\n").encode()


def _dtype_in(section: dict[str, Any]) -> Any:
    return section.get("dtype", section.get("torch_dtype"))
