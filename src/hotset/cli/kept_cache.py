"""The key-value cache that the turns of a conversation share, as far as they agree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotset.models.static_caches import KVCachePool


class KeptCache(ABC):
    """Lends a cache to every turn; whatever goes wrong with it there, what it held then is not used again."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.reused_tokens = 0
        self._cache: Any = None
        self._held: list[int] = []

    @abstractmethod
    def lend(self, ids: list[int], new_tokens: int) -> Any:
        """A cache for so many tokens behind these, which holds what they begin with as far as that is known."""

    def take_back(self, cache: Any, ids: list[int]) -> None:
        """Keep a cache for the next turn; it holds these tokens."""
        if ids:
            self._cache, self._held = cache, ids

    def forget(self) -> None:
        """Begin anew."""
        self._held = []


class GrowingCache(KeptCache):
    """As long as its tokens, as transformers has it by itself."""

    def lend(self, ids: list[int], new_tokens: int) -> Any:  # noqa: ARG002 - it grows as they come
        """The cache of earlier turns, cut to what this turn begins with, or a fresh one."""
        from transformers import DynamicCache

        shared = _shared(self._held, ids)
        surplus = len(self._held) - shared
        cache, self._cache, self._held = self._cache, None, []
        if shared and (surplus == 0 or _can_be_cut(cache)):
            if surplus:
                cache.crop(-surplus)
            self.reused_tokens = shared
            return cache
        self.reused_tokens = 0
        return DynamicCache(config=self.config)


class FixedCache(GrowingCache):
    """Of fixed size, as decode steps that the device drives need it; the same memory as long as it is large enough.

    Once the device does not drive any more, it is a growing one.
    """

    def __init__(self, config: Any, pool: KVCachePool) -> None:
        super().__init__(config)
        self.pool = pool

    def lend(self, ids: list[int], new_tokens: int) -> Any:
        """The cache of earlier turns, cut to what this turn begins with: what lies behind is hidden, then written over.

        Graphs know a cache by its address. So it is emptied rather than replaced, and a larger one takes its tokens.
        """
        if not self.pool.is_open:
            if self.pool.is_static(self._cache):
                self._cache, self._held = None, []
            return super().lend(ids, new_tokens)
        shared, self._held = _shared(self._held, ids), []
        if self._cache is None or _length(self._cache) < len(ids) + new_tokens:
            self._cache = self._grown(len(ids) + new_tokens, shared)
        elif shared:
            for layer in self._cache.layers:
                layer.cumulative_length.fill_(shared)
        else:
            self._cache.reset()
        self.reused_tokens = shared
        return self._cache

    def _grown(self, tokens: int, shared: int) -> Any:
        """A cache for so many tokens, with those that are shared copied from the one before."""
        before, larger = self._cache, self.pool.acquire(1, tokens)
        for old, new in zip(before.layers if shared else (), larger.layers, strict=False):
            if not new.is_initialized:
                new.lazy_initialization(old.keys, old.values)
            new.keys[:, :, :shared].copy_(old.keys[:, :, :shared])
            new.values[:, :, :shared].copy_(old.values[:, :, :shared])
            new.cumulative_length.fill_(shared)
        self.pool.release(before)
        return larger


def cache_for(model: Any) -> KeptCache:
    """The kind that a model runs fastest with."""
    pool: KVCachePool = model.hotset.static_caches
    return FixedCache(model.config, pool) if pool.serves() else GrowingCache(model.config)


def _length(cache: Any) -> int:
    return int(cache.layers[0].max_cache_len)


def _shared(held: list[int], ids: list[int]) -> int:
    """How many tokens two sequences begin with alike; the last must be computed to say what follows.

    Templates rewrite history, and a text may be read back as other tokens than it was written with.
    """
    for place, (a, b) in enumerate(zip(held, ids[:-1], strict=False)):
        if a != b:
            return place
    return min(len(held), len(ids) - 1)


def _can_be_cut(cache: Any) -> bool:
    """Whether tokens can be taken off the end: windows and states that forget cannot be rolled back."""
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in cache.layers)
