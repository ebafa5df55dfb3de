"""Values of a config.json that no checkpoint can mean; sizes are refused before a model of that size is built."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hotset.errors import HotsetError, ModelError
from hotset.store.header import read_header

_LAYERS = re.compile(r"layers?$")
_COUNT = re.compile(r"^(num|n)_|_(experts|heads)$")
_SIZE = re.compile(r"_(size|dim|rank)$")
_CONTEXT = re.compile(r"position|context|ctx")  # as long as one likes
_USUAL = {_LAYERS: 256, _COUNT: 4096, _SIZE: 2**20}
_PACKED = 64  # a stored dimension may be so many times smaller than what it stands for
_MAX_CONFIG_BYTES = 16 * 1024**2
_QUANTISATION = "quantization_config"
_BOUND = re.compile(r"limit|clamp|clip|_(min|max)$")  # what may be infinite


def refuse_absurd_config(model: str) -> None:
    """Refuse a folder whose config states sizes far beyond its tensors', or whose quantization_config is none.

    Building a model of such sizes would never end, and the library takes any quantization_config for an object.
    """
    config = _config(Path(model))
    quantised = config.get(_QUANTISATION) if isinstance(config, dict) else None
    if quantised is not None and not isinstance(quantised, dict):
        raise ModelError(
            f"config.json of {model} has {quantised!r:.60} as its {_QUANTISATION}, which must be an object with the "
            "quant_method that made the checkpoint: download the file again, or take it out if the weights are plain"
        )
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


def refuse_no_numbers(where: str, document: Any) -> None:
    """Refuse a config with a value that is no number, or is infinite and no bound: nothing can be computed with it."""
    for key, value, bounds in _floats(document):
        if math.isnan(value) or (math.isinf(value) and not bounds):
            raise ModelError(f"{where} says {key} = {value}, which no model computes with: download it again")


def refuse_top_k(config: Any, top_k: int, experts: int, names: Sequence[str]) -> NoReturn:
    """Refuse a number of experts per token that a layer does not have, by the name that the config has for it."""
    document = config.to_dict() if hasattr(config, "to_dict") else {}
    stated = [key for key, number in _numbers(document) if key in names and number == top_k]
    raise ModelError(
        f"the config says {stated[0] if stated else names[0]} = {top_k:,}, and a layer has {experts:,} experts: it "
        f"must be 1 to {experts:,}; download config.json again"
    )


def _floats(document: Any, name: str = "", *, bounds: bool = False) -> Iterator[tuple[str, float, bool]]:
    """All fractions with their names, a part's as well, and whether they may be bounds, as those in lists may be."""
    if isinstance(document, float):
        yield name, document, bounds or _BOUND.search(name) is not None
    for key, value in document.items() if isinstance(document, dict) else ():
        yield from _floats(value, str(key))
    for value in document if isinstance(document, list | tuple) else ():
        yield from _floats(value, name, bounds=True)


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
