"""Key-value caches of fixed size: graphs know memory by its address."""

from __future__ import annotations

import threading
from typing import Any

import torch

MOST = 4
LEAST_LENGTH = 512


class LentCaches:
    """Caches of one model by size, used again by one call after another; nobody else has one that is lent."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self._kept: dict[tuple[int, int, bool], Any] = {}
        self._lock = threading.Lock()  # several threads may answer at a time

    def __len__(self) -> int:
        return len(self._kept)

    def lend(self, batch: int, tokens: int) -> Any:
        """An empty cache for so many sequences of up to so many tokens; None if the model's cannot be captured.

        What inference mode has made, nobody may write to outside of it: such caches are apart.
        """
        length = length_for(tokens)
        size = batch, length, torch.is_inference_mode_enabled()
        with self._lock:
            cache = self._kept.pop(size, None)
        cache = cache or static_cache(self.config, length)
        if not has_static_layers(cache):
            return None
        cache.reset()
        cache.hotset_size = size
        return cache

    def keep(self, cache: Any) -> None:
        """Take a cache back that was lent."""
        size = getattr(cache, "hotset_size", None)
        if size is None:
            return
        with self._lock:
            while len(self._kept) >= MOST:
                del self._kept[next(iter(self._kept))]
            self._kept[size] = cache

    def clear(self) -> None:
        """Let all go."""
        self._kept.clear()


def length_for(tokens: int) -> int:
    """The length of a cache for so many tokens: few lengths, so that graphs are used again."""
    return max(LEAST_LENGTH, 1 << (tokens - 1).bit_length())


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
