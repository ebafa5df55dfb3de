"""The key-value cache that prompts share as far as they begin alike, such as the turns of a conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotset.models.static_caches import KVCachePool


class PrefixCache:
    """Keeps the key-value cache of one prompt for the next; what a failed answer left in it is not used again.

    It is static, from the model's pool, while a GPU drives itself by captured steps: they know a cache by its address,
    so it stays the same as long as it is large enough. Else, and once the device has given up, it is transformers' own.
    """

    def __init__(self, config: Any, pool: KVCachePool) -> None:
        self.reused_tokens = 0
        self._config, self._pool = config, pool
        self._cache: Any = None
        self._held: list[int] = []  # the tokens in it, while it is not in use

    @classmethod
    def of(cls, model: Any) -> PrefixCache:
        """A prefix cache of a model that runs through hotset."""
        return cls(model.config, model.hotset.static_caches)

    def acquire(self, ids: list[int], new_tokens: int) -> Any:
        """A cache for these tokens and so many more; what they share with the tokens before is in it already."""
        held, self._held = self._held, []
        shared = _shared(held, ids)
        found = self._static(len(ids) + new_tokens, shared) or self._dynamic(shared, len(held) - shared)
        cache, self.reused_tokens = found
        return cache

    def release(self, cache: Any, ids: list[int]) -> None:
        """Keep a cache for the next prompt; it holds these tokens, or nothing that can be used."""
        if ids:
            self._cache, self._held = cache, ids

    def clear(self) -> None:
        """Begin anew."""
        self._held = []

    def _static(self, tokens: int, shared: int) -> tuple[Any, int] | None:
        """A static cache of at least this length with the shared tokens in it; None where there is none to be had.

        What lies behind the shared tokens is masked, then overwritten.
        """
        if not self._pool.is_open:
            return None
        kept = self._cache if self._pool.is_static(self._cache) else None
        if kept is not None and kept.layers[0].max_cache_len >= tokens:
            if not shared:
                kept.reset()
            for layer in kept.layers if shared else ():
                layer.cumulative_length.fill_(shared)
            return kept, shared
        larger = self._pool.acquire(1, tokens)
        if larger is None:
            return None
        shared = 0 if kept is None else shared
        _copy(kept, larger, shared)
        self._pool.release(kept)
        self._cache = larger
        return larger, shared

    def _dynamic(self, shared: int, surplus: int) -> tuple[Any, int]:
        """The cache before, cut to the shared tokens, or a fresh one."""
        from transformers import DynamicCache

        kept, self._cache = self._cache, None
        if shared and not self._pool.is_static(kept) and (surplus == 0 or _can_be_cut(kept)):
            if surplus:
                kept.crop(-surplus)
            return kept, shared
        return DynamicCache(config=self._config), 0


def _copy(source: Any, target: Any, tokens: int) -> None:
    """Copy the first tokens of a static cache to a larger one."""
    for old, new in zip(source.layers if tokens else (), target.layers, strict=False):
        if not new.is_initialized:
            new.lazy_initialization(old.keys, old.values)
        new.keys[:, :, :tokens].copy_(old.keys[:, :, :tokens])
        new.values[:, :, :tokens].copy_(old.values[:, :, :tokens])
        new.cumulative_length.fill_(tokens)


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
