"""Numbers of a config.json that no checkpoint can mean, refused before a model of that size is built."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hotset.errors import HotsetError, ModelError
from hotset.store.header import read_header

_LAYERS = re.compile(r"layers?$")
_COUNT = re.compile(r"^(num|n)_|_(experts|heads)$")
_SIZE = re.compile(r"_(size|dim|rank)$")
_CONTEXT = re.compile(r"position|context|ctx")  # as long as one likes
_USUAL = {_LAYERS: 256, _COUNT: 4096, _SIZE: 2**20}
_PACKED = 64  # a stored dimension may be so many times smaller than what it stands for
_MAX_CONFIG_BYTES = 16 * 1024**2


def refuse_absurd_sizes(model: str) -> None:
    """Refuse a folder whose config states sizes far beyond its tensors'; building such a model would never end."""
    config = _config(Path(model))
    if any(number > _limit(key) for key, number in _numbers(config)):
        refuse_sizes(f"config.json of {model}", config, _shapes(Path(model)))


def refuse_sizes(where: str, config: Any, shapes: Sequence[tuple[int, ...]]) -> None:
    """Refuse a config that states sizes far beyond the shapes of the tensors that belong to it, if any are known."""
    unusual = [(key, number) for key, number in _numbers(config) if number > _limit(key)]
    if not unusual or not shapes:
        return
    largest = max(len(shapes), *(size for shape in shapes for size in shape), 1)
    for key, number in unusual:
        bound = len(shapes) if _LAYERS.search(key) else _PACKED * largest
        if number > max(bound, _limit(key)):
            raise ModelError(
                f"{where} says {key} = {number:,}, and its {len(shapes):,} tensors have at most "
                f"{largest:,} rows or columns: they belong to different models"
            )


def _config(folder: Path) -> Any:
    """The config as it lies there; one that cannot be read is the library's to refuse."""
    try:
        with (folder / "config.json").open("rb") as file:
            return json.loads(file.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def _numbers(document: Any) -> Iterator[tuple[str, int]]:
    """All whole numbers with their names, a part's as well."""
    for key, value in document.items() if isinstance(document, dict) else ():
        if type(value) in (int, float) and abs(value) < float("inf"):
            yield key, int(value)
        elif isinstance(value, dict):
            yield from _numbers(value)


def _limit(key: str) -> float:
    """Up to where a number needs no proof."""
    if _CONTEXT.search(key):
        return float("inf")
    return next((limit for pattern, limit in _USUAL.items() if pattern.search(key)), float("inf"))


def _shapes(folder: Path) -> list[tuple[int, ...]]:
    try:
        return [tensor.shape for file in folder.glob("*.safetensors") for tensor in read_header(file).values()]
    except HotsetError:
        return []  # what is wrong with the file is told where it is read
