"""The arguments and outputs of one call of a model, as a captured step needs them."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor
Values = dict[str, Any]

_EXTRA_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")
_UNUSUAL = ("inputs_embeds", "labels")


def set_lengths(cache: Any, lengths: list[Tensor]) -> None:
    """Say how many tokens the layers of a cache hold."""
    for layer, length in zip(cache.layers, lengths, strict=True):
        layer.cumulative_length.copy_(length)


def is_plain(values: Values, config: Any) -> bool:
    """Whether a call asks for nothing but logits, with arguments that a graph can be told apart by."""
    if any(values.get(name) is not None for name in _UNUSUAL):
        return False
    if _asked(values, config, "return_dict") is False or any(_asked(values, config, name) for name in _EXTRA_OUTPUTS):
        return False
    return all(_is_known(value) for name, value in values.items() if name != "past_key_values")


def _asked(values: Values, config: Any, name: str) -> Any:
    given = values.get(name)
    return getattr(config, name, None) if given is None else given


def _is_known(value: Any) -> bool:
    if isinstance(value, dict):
        return all(part is None or isinstance(part, Tensor) for part in value.values())
    return value is None or isinstance(value, Tensor | int | float | str)


def tensors_of(values: Values) -> dict[str, Tensor]:
    """All tensors among the arguments of a call, those in dictionaries by both names."""
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, dict):
            found |= {f"{name}.{key}": part for key, part in value.items() if isinstance(part, Tensor)}
    return found


def signature_of(values: Values) -> tuple[Any, ...]:
    """What must be alike for a graph to be used again."""
    tensors = tuple((name, tuple(t.shape), t.dtype) for name, t in sorted(tensors_of(values).items()))
    plain = tuple((name, value) for name, value in sorted(values.items()) if isinstance(value, int | float | str))
    cache = values["past_key_values"]
    places = cache.layers[0].keys.data_ptr(), cache.layers[-1].values.data_ptr()
    return tensors, plain, id(cache), places, torch.is_inference_mode_enabled()


def cloned(value: Any) -> Any:
    """A copy that the graph may read at every replay."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: cloned(part) for key, part in value.items()}
    return value


def drop_cache(outputs: Any, cache: Any) -> None:
    """Have outputs not keep a cache alive: it comes with every call."""
    for name in [name for name, value in outputs.items() if value is cache]:
        outputs[name] = None


def copied(outputs: Any, cache: Any) -> Any:
    """The outputs as the caller may keep them: the next replay overwrites what the graph writes."""
    kept = {name: value.clone() if isinstance(value, Tensor) else value for name, value in outputs.items()}
    return type(outputs)(**kept | {"past_key_values": cache})
