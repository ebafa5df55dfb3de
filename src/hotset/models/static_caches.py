"""Static key-value caches, and which calls of generate take one.

Graphs know memory by its address, so one cache serves one call after another.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch

MAX_CACHES = 4
MIN_LENGTH = 512


class CacheSize(NamedTuple):
    """What makes two caches interchangeable."""

    batch: int
    length: int
    inference: bool  # what inference mode has made, nothing may write to outside of it: such caches are apart


class KVCachePool:
    """The one owner of static key-value caches of a model: each call of generate acquires one, and releases it.

    They are of use only while the device may drive: the pool is opened by what captures steps, and closed when that
    gives up. A closed pool has none to give, and callers go on with the library's own caches.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.is_open = False
        self._free: dict[CacheSize, Any] = {}
        self._given: weakref.WeakKeyDictionary[Any, CacheSize] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # several threads may generate at a time

    def __len__(self) -> int:
        return len(self._free)

    def open(self) -> None:
        """Have caches for callers."""
        self.is_open = True

    def close(self) -> None:
        """Let all go, and have none from here on."""
        self.is_open = False
        self.clear()

    def clear(self) -> None:
        """Let all go that are not in use."""
        with self._lock:
            self._free.clear()

    @staticmethod
    def is_static(cache: Any) -> bool:
        """Whether a cache is of the kind that is had here."""
        return has_static_layers(cache)

    def acquire(self, batch: int, tokens: int) -> Any:
        """An empty cache for so many sequences of up to so many tokens; None if there is none to be had.

        That is where the device does not drive, or the model keeps more than keys and values.
        """
        if not self.is_open:
            return None
        size = CacheSize(batch, length_for(tokens), torch.is_inference_mode_enabled())
        with self._lock:
            cache = self._free.pop(size, None)
        cache = cache or static_cache(self.config, size.length)
        if not has_static_layers(cache):
            return None
        cache.reset()
        with self._lock:
            self._given[cache] = size
        return cache

    def release(self, cache: Any) -> None:
        """Take a cache back that was acquired, whatever it holds; others are left alone."""
        with self._lock:
            size = None if cache is None else self._given.pop(cache, None)
            if size is None or not self.is_open:
                return
            while len(self._free) >= MAX_CACHES:
                del self._free[next(iter(self._free))]
            self._free[size] = cache


def length_for(tokens: int) -> int:
    """The length of a cache for so many tokens: few lengths, so that graphs are used again."""
    return max(MIN_LENGTH, 1 << (tokens - 1).bit_length())


def has_static_layers(cache: Any) -> bool:
    """Whether every layer of a cache is a block of fixed size that knows its own length."""
    from transformers.cache_utils import StaticLayer

    layers: list[Any] = getattr(cache, "layers", None) or []
    moved = getattr(cache, "offloading", False)
    return bool(layers) and not moved and all(type(layer) is StaticLayer for layer in layers)


def is_static(cache: Any) -> bool:
    """Whether a cache is of fixed size, and made: there is something in it."""
    return has_static_layers(cache) and all(layer.is_initialized for layer in cache.layers)


def static_cache(config: Any, length: int) -> Any:
    """A key-value cache of fixed size; windows are left to masks: a rolling block runs other code once it is full."""
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer

    cache = StaticCache(config=config, max_cache_len=length)
    cache.layers = [StaticLayer(length) if getattr(layer, "is_sliding", False) else layer for layer in cache.layers]
    return cache


_DRAFTS = {
    "assistant_model": "an assistant's drafts",
    "prompt_lookup_num_tokens": "drafts by prompt lookup",
    "assistant_early_exit": "drafts by early exit",
    "use_mtp": "drafts by multi-token prediction",
}
"""Options by which tokens are drafted and some of them taken back, and what to call that."""


class GenerateArguments:
    """What a call of generate asks for: by argument, by a configuration of its own, or else by the model's."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], config: Any) -> None:
        self._kwargs = kwargs
        self._configs = kwargs.get("generation_config"), args[1] if len(args) > 1 else None, config

    def _asked(self, name: str) -> Any:
        given = [self._kwargs.get(name), *(getattr(config, name, None) for config in self._configs)]
        return next((value for value in given if value is not None), None)

    @property
    def reorders_cache(self) -> str | None:
        """What makes it reorder the cache or take tokens back, in words; None if nothing does."""
        if (self._asked("num_beams") or 1) > 1:
            return "beam search"
        return next((what for name, what in _DRAFTS.items() if self._asked(name)), None)

    @property
    def other_cache(self) -> bool:
        """Whether it names a cache, wants to keep it, or moves it about."""
        named = self._kwargs.get("past_key_values") is not None or self._asked("cache_implementation") is not None
        kept = self._asked("return_dict_in_generate") or self._asked("use_cache") is False
        return bool(named or kept or self.reorders_cache)

    @property
    def answers(self) -> int:
        """How many answers to each prompt."""
        return int(self._asked("num_return_sequences") or 1)

    def length(self, ids: torch.Tensor) -> int:
        """How many tokens it may come to."""
        new = self._asked("max_new_tokens")
        if new is not None:
            return ids.shape[1] + int(new)
        longest = self._asked("max_length")
        return int(longest) if longest is not None else ids.shape[1] + 20
