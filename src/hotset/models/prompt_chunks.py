"""Long prompts in chunks, so that activations stay below a bound; and a prompt that memory cannot hold is refused."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch

from hotset.engine.memory import return_free_blocks
from hotset.errors import BudgetError
from hotset.models.footprint import Footprint
from hotset.shape import format_size

Values = dict[str, Any]
NEW_TOKENS = 256
"""Tokens of an answer whose keys and values must find room beside the prompt's."""
_PLAIN = ("use_cache", "return_dict", "logits_to_keep", "past_key_values", "input_ids", "attention_mask")
_SLICED = ("position_ids", "cache_position")
_EXTRAS = ("output_attentions", "output_hidden_states", "output_router_logits")


class Prompt(NamedTuple):
    """One call over more than a token: so many sequences, new tokens of each, and tokens before them."""

    batch: int
    length: int
    past: int

    @property
    def context(self) -> int:
        """The tokens that the last one attends to."""
        return self.past + self.length


@dataclass
class PromptChunks:
    """Stands before a model's forward calls: all chunks of a prompt but the last are computed here, each as a call.

    A chunk is an ordinary pass that goes on with the same key-value cache. How long it is depends on the model and on
    the machine, never on the budget: so the same prompt is computed alike at every budget.
    """

    footprint: Footprint
    bound_bytes: int
    free_bytes: Callable[[], int]
    force: bool = False
    _state: threading.local = field(default_factory=threading.local)

    def attach(self, model: torch.nn.Module) -> Callable[[], None]:
        """Watch the calls of a model; returns what ends it. Whatever else watches calls must be attached later."""
        hook = model.register_forward_pre_hook(self._before, with_kwargs=True)
        return hook.remove

    def rows_for(self, prompt: Prompt) -> int:
        """How many tokens of each sequence are computed together."""
        return self.footprint.rows_within(self.bound_bytes, prompt.batch, prompt.context)

    def needed_bytes(self, prompt: Prompt, cache: Any = None, rows: int | None = None) -> int:
        """What a prompt takes: its key-value cache as far as that is not there yet, and the activations of a chunk."""
        length = min(self.rows_for(prompt), prompt.length) if rows is None else rows
        before = self.footprint.cached_bytes(prompt.past)
        cached = self.footprint.cached_bytes(prompt.context + NEW_TOKENS) - before
        fresh = 0 if _has_its_memory(cache) else prompt.batch * max(cached, 0)
        return fresh + self.footprint.pass_bytes(prompt.batch, length, prompt.context)

    def _before(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Values
    ) -> tuple[tuple[Any, ...], Values] | None:
        if getattr(self._state, "inside", False):
            return None
        values = kwargs if not args else _bound(module, args, kwargs)
        prompt = _prompt(values)
        if prompt is None:
            return None
        splits = prompt.length > self.rows_for(prompt) and _can_be_split(module, values)
        self._refuse_if_short(prompt, values.get("past_key_values"), splits)
        if not splits:
            return None
        *first, last = _pieces(values, prompt, self.rows_for(prompt))
        self._state.inside = True
        try:
            for piece in first:
                module(**piece)
                return_free_blocks()  # chunk after chunk with longer keys and values leaves holes that nothing fits
        finally:
            self._state.inside = False
        return (), last

    def _refuse_if_short(self, prompt: Prompt, cache: Any, splits: bool) -> None:
        needed = self.needed_bytes(prompt, cache, None if splits else prompt.length)
        if self.force or needed <= self.free_bytes():
            return
        return_free_blocks()
        free = self.free_bytes()
        if needed <= free:
            return
        many = f"{prompt.batch} x " if prompt.batch > 1 else ""
        raise BudgetError(
            f"a prompt of {many}{prompt.context:,} tokens needs {format_size(needed)} beside the experts and "
            f"{format_size(max(free, 0))} are free: load the model with --context "
            f"{prompt.batch * (prompt.context + NEW_TOKENS)} (context= in Python) or a smaller --memory"
        )


def _bound(module: Any, args: tuple[Any, ...], kwargs: Values) -> Values:
    """All arguments of a call by name."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError:
        return {}  # the call itself says what is wrong with it
    values: Values = dict(bound.arguments)
    values.update(values.pop("kwargs", {}))
    return values


def _prompt(values: Values) -> Prompt | None:
    """The prompt that a call computes; None for a decode step, or where there are no ids."""
    ids, cache = values.get("input_ids"), cast(Any, values.get("past_key_values"))
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.shape[1] < 2:
        return None
    past = int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0
    return Prompt(ids.shape[0], ids.shape[1], past)


def _can_be_split(module: Any, values: Values) -> bool:
    """Whether a call asks for no more than the last logits, of a cache that takes a prompt in several pieces."""
    known = {*_PLAIN, *_SLICED, *_EXTRAS}
    if any(value is not None and name not in known for name, value in values.items()):
        return False
    if not isinstance(values.get("logits_to_keep"), int) or values["logits_to_keep"] != 1:
        return False
    asked = (values.get(name, getattr(module.config, name, None)) for name in _EXTRAS)
    if any(asked) or values.get("use_cache") is False:
        return False
    if _turns_by_length(module.config):
        return False
    mask = values.get("attention_mask")
    masks = [each for each in (mask.values() if isinstance(mask, dict) else [mask]) if each is not None]
    plain = all(isinstance(each, torch.Tensor) and each.dim() in (2, 4) for each in masks)
    return plain and _takes_pieces(values.get("past_key_values"))


def _turns_by_length(config: Any) -> bool:
    """Whether positions turn differently by the length of the whole prompt, which a chunk does not know."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(text, "rope_parameters", None) or {}
    kinds = [found, *(each for each in found.values() if isinstance(each, dict))]
    return any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds)


def _takes_pieces(cache: Any) -> bool:
    """Whether every layer of a cache is keys and values: states of other kinds begin anew with every prompt."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

    layers = getattr(cache, "layers", None)
    if layers is None or getattr(cache, "offloading", False):
        return False
    if not layers:  # it has none yet: those that it will make
        return getattr(cache, "layer_class_to_replicate", None) is DynamicLayer
    # A window of fixed size rolls: a mask that was made for the whole prompt does not fit its pieces.
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer) for layer in layers)


def _has_its_memory(cache: Any) -> bool:
    """Whether a cache is of fixed size and allocated."""
    layers: list[Any] = getattr(cache, "layers", None) or []
    return bool(layers) and all(
        hasattr(layer, "max_cache_len") and getattr(layer, "is_initialized", False) for layer in layers
    )


def _pieces(values: Values, prompt: Prompt, rows: int) -> Iterator[Values]:
    """The same call in pieces of equal length, so that none of them is a single token, which would be a decode step."""
    count = -(-prompt.length // rows)
    ends = [prompt.length * number // count for number in range(count + 1)]
    for begin, end in pairwise(ends):
        piece = dict(values)
        piece["input_ids"] = values["input_ids"][:, begin:end]
        for name in _SLICED:
            if values.get(name) is not None:
                piece[name] = values[name][..., begin:end]
        if values.get("attention_mask") is not None:
            piece["attention_mask"] = _masked(values["attention_mask"], prompt, begin, end)
        yield piece


def _masked(mask: Any, prompt: Prompt, begin: int, end: int) -> Any:
    """What a piece sees of a mask: as far as its own end, and of a square one its own rows."""
    if isinstance(mask, dict):
        return {name: _masked(part, prompt, begin, end) for name, part in mask.items()}
    if mask is None:
        return None
    columns = prompt.past + end if mask.shape[-1] == prompt.context else mask.shape[-1]
    return mask[:, :columns] if mask.dim() == 2 else mask[:, :, begin:end, :columns]
