"""Watches the model's forward calls: whose tokens they compute, in which phase, and how long they take."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hotset.runtime.engine import Engine
from hotset.runtime.passes import Pass
from hotset.trace import Phase


class PassWatcher:
    """Tells an engine of every forward pass; decode is a pass that adds one token to sequences already begun."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.passes = 0
        self.requests = 0
        self._batch = 0
        self._phase = Phase.PREFILL
        self._began_s = 0.0
        self._depth = 0  # an encoder may run inside its model or alone
        self._root: Callable[[], Any] = lambda: None
        self._cache: Callable[[], Any] = lambda: None  # that the pass under way, or the last one, adds to
        self._edits: int | None = None  # of that cache, when the last pass ended
        self.before_pass: Callable[[Pass], None] = lambda _: None

    def attach(self, model: torch.nn.Module) -> Callable[[], None]:
        """Watch a model; returns what ends it."""
        watched, self._root = [model], weakref.ref(model)
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            watched.append(model.get_encoder())  # type: ignore[operator]  # generate() calls it by itself
        handles: list[Any] = []
        for module in watched:
            handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            handles.append(module.register_forward_hook(self._after, always_call=True))

        def detach() -> None:
            for handle in handles:
                handle.remove()

        return detach

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is self._root():
            self._depth = 0  # of a pass that an interrupt has ended nobody is told
        self._depth += 1
        if self._depth > 1:
            return
        tokens = _tokens(args, kwargs)
        batch, length = (1, 1) if tokens is None else (tokens.shape[0], tokens.shape[1] if tokens.dim() > 1 else 1)
        fresh = self._is_fresh(kwargs.get("past_key_values"), length)
        phase = Phase.DECODE if length == 1 and not fresh else Phase.PREFILL
        next_turn = length > 1 and self._phase is Phase.DECODE  # of a chat that goes on with the same cache
        if fresh or next_turn or batch != self._batch:
            self.requests += self._batch
            self._batch = batch
        self._phase = phase
        self.passes += 1
        run = Pass(self.passes, batch, length, phase, self.requests, self._ids(tokens))
        if phase is Phase.PREFILL:
            self.engine.catch_up()  # a request ends here, with all that was served for it
        self.before_pass(run)
        self.engine.begin(run)
        self._began_s = time.perf_counter()

    def _is_fresh(self, cache: Any, length: int) -> bool:
        """Whether nothing came before; a cache on the device is not asked for its length at every token."""
        goes_on = length == 1 and cache is not None and self._cache() is cache
        self._cache = weakref.ref(cache) if hasattr(cache, "__weakref__") else lambda: None
        if goes_on and self._edits is not None and _edits(cache) == self._edits:
            return False
        return _seen_tokens(cache) == 0

    def _ids(self, tokens: torch.Tensor | None) -> Any:
        wanted = self.engine.recorder is not None or self.engine.wants_tokens
        if not wanted or tokens is None or tokens.is_floating_point():
            return None
        return tokens.reshape(-1).cpu().numpy().astype(np.int32)

    def _after(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth:
            return
        self._edits = None if output is None else _edits(self._cache())  # after a failure it may be as it was
        self.engine.end(self.engine.current, time.perf_counter() - self._began_s)


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The new tokens of a call, as ids or as embeddings."""
    for name in ("decoder_input_ids", "input_ids", "inputs_embeds", "decoder_inputs_embeds"):
        found = kwargs.get(name)
        if isinstance(found, torch.Tensor):
            return found
    return args[0] if args and isinstance(args[0], torch.Tensor) else None


def _seen_tokens(cache: Any) -> int:
    """How many tokens a key-value cache holds."""
    if cache is None:
        return 0
    length = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 1
    return int(length)


def _edits(cache: Any) -> int | None:
    """How often the length of a cache of fixed size was written to by the host; None where there is no telling.

    A reset is such an edit. The replay of a graph is none, but it only adds to the length.
    """
    layers = getattr(cache, "layers", None)
    length = getattr(layers[0], "cumulative_length", None) if layers else None
    if not isinstance(length, torch.Tensor) or length.is_inference():
        return None
    return int(length._version)
