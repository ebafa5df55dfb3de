"""Stands in for a model's generate where the device may drive: which calls get a static key-value cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hotset.models.static_caches import GenerateArguments, KVCachePool


class Reordering(threading.local):
    """The calls of generate that a thread has under way and that reorder their key-value cache."""

    under_way = 0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """A context in which one more is."""
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1


class GenerateHook:
    """The model's generate, with a static cache where it leaves the choice to us and steps can be captured."""

    def __init__(self, model: Any, caches: KVCachePool, warn: Callable[[str], Any]) -> None:
        self.model, self.caches, self.warn = model, caches, warn
        self.stock: Callable[..., Any] = model.generate
        self.reordering = Reordering()
        self._told: set[str] = set()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the model does."""
        if not self.caches.is_open:
            return self.stock(*args, **kwargs)
        kwargs = kwargs | {"disable_compile": True}  # with a static cache stock compiles steps that are captured here
        asked = GenerateArguments(args, kwargs, self.model.generation_config)
        if asked.reorders_cache is not None:
            self._tell_of_reordering(asked.reorders_cache)
            with self.reordering.one_more():
                return self.stock(*args, **kwargs)
        ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
        encoder_decoder = getattr(self.model.config, "is_encoder_decoder", False)
        if not isinstance(ids, torch.Tensor) or asked.other_cache or encoder_decoder:
            return self.stock(*args, **kwargs)
        cache = self.caches.acquire(len(ids) * asked.answers, asked.length(ids))
        try:
            return self.stock(*args, **kwargs if cache is None else kwargs | {"past_key_values": cache})
        finally:
            self.caches.release(cache)

    def _tell_of_reordering(self, what: str) -> None:
        """Say once of each way to write that the host drives it."""
        if what not in self._told:
            self._told.add(what)
            self.warn(f"the host drives calls with {what}: they move the key-value cache, which a graph cannot follow")
