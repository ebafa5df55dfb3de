"""Watches the model's forward calls, and makes a step of each: whose tokens it computes, and in which phase."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from hotset.engine.driver import Driver
from hotset.engine.engine import Engine
from hotset.engine.step import NO_REQUEST, Step
from hotset.trace import Phase


class Running(NamedTuple):
    """A step under way, and the model that it is of; it must keep no model alive: an interrupt may leave it here."""

    tracker: int
    step: Step


_RUNNING: ContextVar[Running | None] = ContextVar("hotset_step", default=None)
"""Carries the step across the code of transformers, which knows nothing of it."""
_NUMBERS = itertools.count(1)
MAX_VERIFIED_TOKENS = 64
"""The most drafted tokens that a decode step verifies, where its caller asks for the logits of all of them."""
MAX_DRAFT_TOKENS = 8
"""The same where only the length and what was done before tell a decode step from a prompt."""
MIN_TURN_TOKENS = 3
"""A turn of a chat is no shorter; an assistant model begins each of its drafts with a token or two."""


@dataclass(slots=True)
class Sequences:
    """The sequences that share a key-value cache: whose they are, and what was last done to them."""

    first_request: int = 0
    batch: int = 0
    phase: Phase = Phase.PREFILL
    edits: int | None = None  # of the cache, when the last step ended
    end: int = 0  # the tokens in the cache when the last step ended


@dataclass(slots=True)
class Open:
    """A step that a thread computes now, its sequences and their cache, and the step of another model around it."""

    step: Step
    sequences: Sequences
    cache: Callable[[], Any]
    began_s: float
    outer: Running | None


class PerThread(threading.local):
    """What the tracker knows of one thread."""

    def __init__(self) -> None:
        self.depth = 0  # an encoder may run inside its model or alone
        self.open: Open | None = None
        self.last = Sequences()  # of the step before
        self.encoded: Sequences | None = None  # of an encoder that ran alone: its decoder follows


class StepTracker:
    """Tells an engine of every step; decode is a step that adds to an answer: a token, or a few that were drafted.

    A step belongs to the thread that computes it, a request to its key-value cache: threads that take turns with one
    cache go on with one request.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # A step that an interrupt has left in the context variable must not keep the engine's memory.
        self._driver: Driver = weakref.proxy(engine.driver)
        self._anonymous = Step(0, 1, 1, Phase.PREFILL, NO_REQUEST, self._driver)
        self.steps = 0
        self.requests = 0
        self._number = next(_NUMBERS)
        self._lock = threading.Lock()
        self._thread = PerThread()
        self._held: weakref.WeakKeyDictionary[Any, Sequences] = weakref.WeakKeyDictionary()
        self._root: Callable[[], Any] = lambda: None
        self._encoder: Callable[[], Any] = lambda: None

    def attach(self, model: torch.nn.Module) -> Callable[[], None]:
        """Watch a model; returns what ends it."""
        watched, self._root = [model], weakref.ref(model)
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            watched.append(model.get_encoder())  # type: ignore[operator]  # generate() calls it by itself
            self._encoder = weakref.ref(watched[-1])
        handles: list[Any] = []
        for module in watched:
            handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            handles.append(module.register_forward_hook(self._after, always_call=True))

        def detach() -> None:
            for handle in handles:
                handle.remove()

        return detach

    def current(self) -> Step:
        """The step that the calling thread computes; what is called outside of any belongs to an anonymous one."""
        running = _RUNNING.get()
        return running.step if running is not None and running.tracker == self._number else self._anonymous

    def serving(self, step: Step, call: Callable[[], Any]) -> Any:
        """Call something whose MoE layers belong to a step; however that ends, nothing of it is left behind."""

        def inside() -> Any:
            _RUNNING.set(Running(self._number, step))
            return call()

        return copy_context().run(inside)

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.engine.guard.owner.is_here:
            return  # in a child of the process, which counts nothing
        mine = self._thread
        if module is self._root():
            mine.depth = 0  # torch calls no hook after an interrupt
        mine.depth += 1
        if mine.depth > 1:
            return
        self._abandon()
        tokens, cache = _tokens(args, kwargs), kwargs.get("past_key_values")
        batch, length = (1, 1) if tokens is None else (tokens.shape[0], tokens.shape[1] if tokens.dim() > 1 else 1)
        sequences = mine.last = self._sequences(module, batch, length, kwargs)
        if sequences.phase is Phase.PREFILL or length > 1:
            self.engine.catch_up()  # the host drives these: it goes on from where the device is
        step = self._step(sequences, length, tokens)
        outer = _RUNNING.get()
        if outer is not None and outer.tracker == self._number:
            outer = None  # an interrupt has left it
        mine.open = Open(step, sequences, _weak(cache), time.perf_counter(), outer)
        _RUNNING.set(Running(self._number, step))

    def _sequences(self, module: torch.nn.Module, batch: int, length: int, kwargs: dict[str, Any]) -> Sequences:
        """The sequences that a call adds to; what begins, or is the next turn of a chat, is a request of its own."""
        mine, cache = self._thread, kwargs.get("past_key_values")
        known = self._known(cache)
        fresh = _is_fresh(cache, length, known)
        found = known or mine.last
        adds = not fresh and (length == 1 or _verifies(found, cache, length, kwargs.get("logits_to_keep")))
        next_turn = not adds and found.phase is Phase.DECODE  # of a chat that goes on with the same cache
        encoded, mine.encoded = mine.encoded, None
        if fresh and encoded is not None and encoded.batch == batch and kwargs.get("encoder_outputs") is not None:
            found = encoded
        elif fresh or next_turn or batch != found.batch:
            found = Sequences(self._allot(batch), batch)
        found.phase = Phase.DECODE if adds else Phase.PREFILL
        before = 0 if fresh else found.end if length == 1 else _seen_tokens(cache)  # to ask a device is to wait for it
        found.end = before + length
        if module is self._encoder():
            mine.encoded = found
        self._hold(cache, found)
        return found

    def _allot(self, batch: int) -> int:
        """The number of the first of so many new requests."""
        with self._lock:
            first = self.requests
            self.requests += batch
        return first

    def _step(self, sequences: Sequences, length: int, tokens: torch.Tensor | None) -> Step:
        with self._lock:
            self.steps += 1
            number = self.steps
        recorder = self.engine.stats.recorder
        ids = _ids(tokens) if self.engine.wants_tokens else None
        recording = 0 if recorder is None else recorder.number
        return Step(
            number, sequences.batch, length, sequences.phase, sequences.first_request, self._driver, ids, recording
        )

    def _known(self, cache: Any) -> Sequences | None:
        try:
            with self._lock:
                return None if cache is None else self._held.get(cache)
        except TypeError:  # of a kind that nothing can be remembered of
            return None

    def _hold(self, cache: Any, sequences: Sequences) -> None:
        if cache is None:
            return
        with suppress(TypeError), self._lock:
            self._held[cache] = sequences

    def _abandon(self) -> None:
        """Say of a step that an interrupt has ended that it is none."""
        found, self._thread.open = self._thread.open, None
        if found is not None:
            self.engine.abandon(found.step)

    def _after(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        mine = self._thread
        mine.depth = max(mine.depth - 1, 0)
        found = mine.open
        if mine.depth or found is None:
            return
        _RUNNING.set(found.outer)
        if output is None:  # it has failed, and the cache may be as it was
            found.sequences.edits = None
            self._abandon()
            return
        cache = found.cache()
        found.sequences.edits = _edits(cache)
        if cache is None:  # the model may have made one
            self._hold(getattr(output, "past_key_values", None), found.sequences)
        self.engine.end(found.step, time.perf_counter() - found.began_s)
        mine.open = None


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The new tokens of a call, as ids or as embeddings."""
    for name in ("decoder_input_ids", "input_ids", "inputs_embeds", "decoder_inputs_embeds"):
        found = kwargs.get(name)
        if isinstance(found, torch.Tensor):
            return found
    return args[0] if args and isinstance(args[0], torch.Tensor) else None


def _ids(tokens: torch.Tensor | None) -> Any:
    if tokens is None or tokens.is_floating_point():
        return None
    return tokens.reshape(-1).cpu().numpy().astype(np.int32)


def _weak(cache: Any) -> Callable[[], Any]:
    """A cache, as long as its owner keeps it."""
    return weakref.ref(cache) if hasattr(cache, "__weakref__") else lambda: None


def _is_fresh(cache: Any, length: int, known: Sequences | None) -> bool:
    """Whether nothing came before; a cache on the device is not asked for its length at every token."""
    if length == 1 and known is not None and known.edits is not None and _edits(cache) == known.edits:
        return False
    return _seen_tokens(cache) == 0


def _verifies(sequences: Sequences, cache: Any, length: int, logits: Any) -> bool:
    """Whether a step of several tokens checks drafts, which adds to an answer, and is no prompt.

    `generate` asks for the logits of all drafted tokens, and of a prompt for the last's. Where the caller does not
    say, a few tokens after decode, or after a rollback, are drafts: those rejected before were taken out again.
    """
    if isinstance(logits, int) and logits > 0:
        return length < MIN_TURN_TOKENS or logits == length <= MAX_VERIFIED_TOKENS
    if length > MAX_DRAFT_TOKENS:
        return False
    return sequences.phase is Phase.DECODE or 0 < _seen_tokens(cache) < sequences.end


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
