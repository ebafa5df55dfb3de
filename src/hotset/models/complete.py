"""Whether a checkpoint holds every weight of its model, and no more layers.

transformers reports what is missing or is not used, and then goes on with random weights, or without those layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hotset.errors import ModelError
from hotset.models.checkpoint import StoredKey
from hotset.models.encoded import HIDDEN
from hotset.models.layers import MoeLayer

_NUMBERED = re.compile(r"\.(?=\d+(?:\.|$))")
_AHEAD = re.compile(r"^(num|n)_.*(nextn|mtp)")
_PACKED = (".qweight", ".weight_packed")
NAMED = 3
"""How many weights a message names before it only counts them."""
REMEDY = "it is incomplete, damaged, or of another model than its config says; download it again"


def refuse_incomplete(report: Any) -> None:
    """Raise ModelError if weights are missing; those that the library ties or knows to be absent are not reported."""
    if report is not None and report.missing_keys:
        raise ModelError(f"the checkpoint does not hold {_some(report.missing_keys)}: {REMEDY}")


def refuse_misfits(report: Any, error: Exception) -> None:
    """Raise ModelError in place of the library's error if weights do not convert, or not to the model's shapes."""
    if report is not None and report.mismatched_keys:
        found = {f"{name} ({_shape(stored)}, not {_shape(own)})" for name, stored, own in report.mismatched_keys}
        raise ModelError(f"the checkpoint holds weights of other shapes: {_some(found)}: {REMEDY}") from error
    if report is not None and report.conversion_errors:
        raise ModelError(
            f"the checkpoint's weights do not make up {_some(report.conversion_errors)}: {REMEDY}"
        ) from error


def refuse_more_layers(model: Any, moe_layers: Sequence[MoeLayer], keys: Sequence[StoredKey]) -> None:
    """Raise ModelError for a checkpoint with layers beyond those that the config counts.

    Layers that predict further tokens lie there in some families: those that the family's class passes over, or that
    the config counts apart. Each of these has tensors that no other layer has, to join a token with a state.
    """
    patterns = [re.compile(each) for each in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    for place, count in _lists_of_layers(model, moe_layers).items():
        layers = _layers_in(place, keys)
        beyond = sorted(number for number in layers if number >= count)
        regular = {name for number in layers if number < count for name in layers[number]}
        ahead = all(layers[number].keys() - regular for number in beyond)
        if ahead and len(beyond) <= max(_counts_ahead(model.config.to_dict()), default=0):
            continue
        for number in beyond:
            for name, key in layers[number].items():
                if not any(pattern.search(f"{place}.{number}.{name}") for pattern in patterns):
                    raise ModelError(
                        f"the checkpoint holds {key}, of layer {number} counted from 0, and its config counts {count} "
                        "layers: the two are of different models; download them again"
                    )


def _lists_of_layers(model: Any, moe_layers: Sequence[MoeLayer]) -> dict[str, int]:
    """The lists of layers that hold experts, and how many layers the model has there."""
    found = {}
    for moe_layer in moe_layers:
        place = _NUMBERED.split(moe_layer.name, maxsplit=1)[0]
        layers = model.get_submodule(place)
        if place != moe_layer.name and hasattr(layers, "__len__"):
            found[place] = len(layers)
    return found


def _layers_in(place: str, keys: Sequence[StoredKey]) -> dict[int, dict[str, str]]:
    """What a checkpoint has of each layer in a list: parameters by their names in the layer, and their stored keys."""
    found: dict[int, dict[str, str]] = {}
    for key, targets, _, _ in keys:
        for target in targets:
            number, dot, name = target.removeprefix(f"{place}.").partition(".")
            if target.startswith(f"{place}.") and dot and number.isdecimal():
                found.setdefault(int(number), {}).setdefault(name, key)
    return found


def _counts_ahead(document: Mapping[str, Any]) -> Iterator[int]:
    """The numbers of layers that predict further tokens, as a config and its parts state them."""
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _counts_ahead(value)
        elif type(value) is int and _AHEAD.search(str(key)):
            yield value


def refuse_unsaid_packing(model: Any, stored: Mapping[str, Any]) -> None:
    """Raise ModelError for packed weights about which the config says nothing: nothing else says how to read them."""
    known = model.state_dict()
    found = next((key for key in stored if key.endswith(_PACKED) and key not in known), None)
    said = hasattr(model.config, HIDDEN) or getattr(model.config, "quantization_config", None) is not None
    if found is not None and not said:
        raise ModelError(
            f"the checkpoint holds packed weights ({found}), and its config.json has no quantization_config that says "
            "how: download config.json again, or write it there as quantize_config.json or the model's page state it"
        )


def _some(names: Iterable[str]) -> str:
    """The first few of many names, and how many more there are."""
    known = sorted(names)
    return f"{', '.join(known[:NAMED])}{f' and {len(known) - NAMED:,} more' if known[NAMED:] else ''}"


def _shape(size: Iterable[int]) -> str:
    return str(list(size))
