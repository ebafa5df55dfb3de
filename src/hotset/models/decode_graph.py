"""Decode steps as one CUDA graph: captured once for each batch and key-value cache, then only replayed."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from hotset.errors import HotsetError, StopAsked
from hotset.models.call_values import copied, is_plain, let_go, own, set_lengths, signature_of, tensors_of
from hotset.models.patches import replace_calls, small_parts_fused
from hotset.models.static_caches import LentCaches, is_static
from hotset.models.wishes import Wishes
from hotset.runtime.graph.engine import MAX_TOKENS, GraphEngine, first_line
from hotset.runtime.graph.side import DeviceSide, gate_key
from hotset.runtime.step import Step
from hotset.trace import Phase

Tensor = torch.Tensor
Values = dict[str, Any]

WARM_UPS = 2
"""Runs before a capture: kernels are compiled, tuned and given their scratch memory."""
MOST_GRAPHS = 16
MOST_IN_A_ROW = 8


class Variant(NamedTuple):
    """What a step does beside computing: send guesses, and keep what a recording wants, with what the gate says."""

    guessing: bool = False
    recording: bool = False
    gate: Any = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What must be alike for a graph to be used again."""
        return self.guessing, self.recording, gate_key(self.gate)


@dataclass
class Captured:
    """One graph, the inputs that it reads and the outputs that it writes, and whose memory it was made for."""

    graph: Any
    inputs: dict[str, Tensor]
    outputs: Any
    side: DeviceSide
    cache: Callable[[], Any]
    variant: Variant  # keeps alive the gate that it reads
    is_fresh: bool = True  # the first launch of a graph takes longer


@dataclass(frozen=True)
class Capture:
    """What a graph is made of, and where its memory is; a rehearsal does all but asking for experts."""

    forward: Callable[..., Any]
    engine: GraphEngine
    side: DeviceSide
    inputs: Values
    variant: Variant
    pool: Any = None

    def __call__(self, *, rehearse: bool = False) -> Any:
        """Run it, or have it captured."""
        guessing, recording, _ = self.variant
        with self.engine.driving:  # whatever ends the block: an interrupt may keep the last line from being reached
            self.engine.drive(self.side, rehearse=rehearse, guessing=guessing, recording=recording)
            try:
                self.side.begin()
                outputs = self.forward(**self.inputs)
                self.side.finish()
            finally:
                self.engine.drive(None)
        return outputs


class Calls(threading.local):
    """The calls of generate that a thread has under way and that move their cache about."""

    under_way = 0

    @contextmanager
    def moving(self) -> Iterator[None]:
        """A context in which one more is."""
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1


def _say_nothing(*_: str) -> None:
    """For whoever is not listened to."""


class DecodeGraphs:
    """The graphs of one model, in the place of its forward.

    What cannot be captured goes the host's way, from then on; where the device is `demanded`, that is an error.
    """

    def __init__(
        self,
        model: Any,
        engine: GraphEngine,
        current: Callable[[], Step],
        *,
        remark: Callable[[str], Any] = _say_nothing,
        demanded: bool = False,
    ) -> None:
        self.model, self.engine, self.remark, self.demanded = model, engine, remark, demanded
        self.current = current  # the step that the calling thread computes
        self.forward: Callable[..., Any] = model.forward
        self.signature = inspect.signature(self.forward)
        self.generate: Callable[..., Any] = model.generate
        self.held: dict[tuple[Any, ...], Captured] = {}
        self.caches = LentCaches(model.config)
        self.why_not: str | None = None  # the device does not drive any more
        self._in_a_row = 0  # captures, and calls that would have been some, since a graph was used again
        self._told: set[int | str] = set()  # sizes of batches that were too large, and what keeps the device from steps
        self._calls = Calls()

    def install(self) -> Callable[[], None]:
        """Take the place of the model's forward and generate; returns what ends it."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        def generate(*args: Any, **kwargs: Any) -> Any:
            moves = Wishes(args, kwargs, self.model.generation_config).moves_cache
            if moves is not None:
                self._tell_of_moves(moves)
                with self._calls.moving():
                    return self.generate(*args, **self._uncompiled(kwargs))
            given = self._with_cache(args, kwargs)
            try:
                return self.generate(*args, **given)
            finally:
                if kwargs.get("past_key_values") is None and self.why_not is None:
                    self.caches.keep(given.get("past_key_values"))

        plain: Any = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
        plain.__signature__ = self.signature  # generate() looks at it
        undo = replace_calls(self.model, plain, generate)

        def remove() -> None:
            undo()
            self.held.clear()
            self.caches.clear()

        return remove

    def _with_cache(self, args: tuple[Any, ...], kwargs: Values) -> Values:
        """Give a call of generate a cache of fixed size, where it leaves the choice to us and that can be captured."""
        ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
        wishes = Wishes(args, kwargs, self.model.generation_config)
        kwargs = self._uncompiled(kwargs)
        if self.why_not is not None:
            return kwargs
        if not isinstance(ids, Tensor) or wishes.other_cache or self._has_encoder:
            return kwargs
        cache = self.caches.lend(len(ids) * wishes.answers, wishes.length(ids))
        return kwargs if cache is None else kwargs | {"past_key_values": cache}

    def _uncompiled(self, kwargs: Values) -> Values:
        """With a cache of fixed size stock compiles: where steps are captured here, it must not."""
        return kwargs if self.why_not is not None else kwargs | {"disable_compile": True}

    def _tell_of_moves(self, what: str) -> None:
        """Say once of each way to write that the host drives it."""
        if self.why_not is None and what not in self._told:
            self._told.add(what)
            self.remark(
                f"the host drives calls with {what}: they move the key-value cache, which a graph cannot follow"
            )

    @property
    def _has_encoder(self) -> bool:
        return bool(getattr(self.model.config, "is_encoder_decoder", False))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step: of decode it is replayed, or captured first; anything else goes the host's way."""
        step = self.current()
        values = kwargs if not args else dict(self.signature.bind(*args, **kwargs).arguments)
        with _current(self.engine.device):
            if self._may(step, values):
                with self.engine.alone():  # nobody may change the cache between a look at it and the launch
                    captured = self._captured(step, values) if self._can() else None
                    if captured is not None:
                        return self._run(step, captured, values)
            return self.forward(*args, **kwargs)

    def _may(self, step: Step, values: Values) -> bool:
        """Whether a call is a step that could be captured."""
        ids = values.get("input_ids")
        return (
            self.why_not is None
            and step.phase is Phase.DECODE
            and isinstance(ids, Tensor)
            and ids.device.type == self.engine.device.type
            and ids.shape[1:] == (1,)
            and not self._calls.under_way
            and not torch.is_autocast_enabled(
                ids.device.type
            )  # it keeps copies of weights, which a graph would outlive
            and is_static(values.get("past_key_values"))
            and is_plain(values, self.model.config)
            and self._fits(ids.shape[0])
            and not self._needs_gradients(values)
        )

    def _needs_gradients(self, values: Values) -> bool:
        """Whether gradients may be asked for: a graph has none to give; says so once."""
        if not torch.is_grad_enabled():
            return False
        kept = (layer.keys for layer in values["past_key_values"].layers)  # earlier steps may have had some
        if not any(part is not None and part.requires_grad for part in chain(self.model.parameters(), kept)):
            return False
        if "gradients" not in self._told:
            self._told.add("gradients")
            self.remark("the host drives steps whose gradients may be asked for: decode under torch.no_grad()")
        return True

    def _fits(self, tokens: int) -> bool:
        """Whether the device serves so many tokens at once; says once, of each number, what it lacks to do so."""
        fits = self.engine.fits(tokens)
        if not fits and tokens <= MAX_TOKENS and tokens not in self._told:
            self._told.add(tokens)
            least = min(tokens * self.engine.shape.top_k, self.engine.shape.experts)
            self.remark(
                f"the host drives batches of {tokens}: for the device to do it, load the model with "
                f"staging={least} or more, on the command line by --staging {least}"
            )
        return fits

    def _can(self) -> bool:
        """Whether the device can take over now; a cache that has changed its policy needs other kernels."""
        if not self.engine.ready:
            return False
        if self.engine.is_outdated:
            self.held.clear()
            self.engine.discard()
            reason = self.engine.why_not()
            if reason is not None:
                self._give_up(reason)
        return self.why_not is None

    def _give_up(self, reason: str) -> None:
        """Let the host drive from now on."""
        self.why_not = reason
        self.held.clear()
        self.caches.clear()
        self.engine.discard()
        self.remark(f"the host drives the GPU, for {reason}")

    def _captured(self, step: Step, values: Values) -> Captured | None:
        """The graph for a call; None if there cannot be one."""
        engine = self.engine
        recording = engine.recorder_of(step) is not None
        variant = Variant(engine.guesses_in(step), recording, engine.gate if recording else None)
        key = signature_of(values), variant.key, engine.built
        found = self.held.pop(key, None)
        if found is not None and found.cache() is values["past_key_values"]:
            self._in_a_row = 0
        else:
            found = self._try_to_capture(values, variant) if self._is_worth_it() else None
        if found is None:
            return None
        self.held[key] = found  # as the one used last
        return found

    def _is_worth_it(self) -> bool:
        """Whether to capture: not if one call after another needs a graph of its own, as with masks that grow."""
        self._in_a_row += 1
        return self._in_a_row <= MOST_IN_A_ROW or self._in_a_row % 64 == 0

    def _try_to_capture(self, values: Values, variant: Variant) -> Captured | None:
        self.held = {key: one for key, one in self.held.items() if one.cache() is not None}
        while len(self.held) >= MOST_GRAPHS:
            del self.held[next(iter(self.held))]
        try:
            return self._capture(values, variant)
        except StopAsked:
            raise
        except Exception as error:
            if self.demanded:
                raise HotsetError(
                    f"the device cannot drive this model: its decode could not be captured: {first_line(error)}; "
                    "leave --engine out, or use --engine host"
                ) from error
            reason = first_line(error)
        self._give_up(f"its decode could not be captured: {reason}")
        return None

    def _capture(self, values: Values, variant: Variant) -> Captured:
        """Run a step a few times to compile and tune all kernels, undo what that did, then capture it."""
        engine, cache = self.engine, values["past_key_values"]
        engine.catch_up()
        side = engine.side_for(values["input_ids"].shape[0])
        engine.hand_over()  # a rehearsal writes to the rows of guesses: it must know which these are
        with torch.inference_mode(False), torch.no_grad():
            inputs = {name: own(value) for name, value in values.items()}
            lengths = [layer.cumulative_length.clone() for layer in cache.layers]
        step = Capture(self.forward, engine, side, inputs, variant, self._pool())
        try:
            with small_parts_fused(self.model, engine.device), torch.no_grad():
                with aside(engine.device):
                    for _ in range(WARM_UPS):
                        set_lengths(cache, lengths)  # there may be room for one token more, and not for two
                        step(rehearse=True)
                set_lengths(cache, lengths)
                graph, outputs = recorded(step)
        finally:
            engine.streams.wait_for_all()  # where it failed, something may still run
            set_lengths(cache, lengths)
            side.forget()
        let_go(outputs, cache)
        return Captured(graph, tensors_of(inputs), outputs, side, weakref.ref(cache), variant)

    def _pool(self) -> Any:
        """The memory of all graphs, since only one of them runs at a time; a new one where no graph uses it any more.

        With its last graph torch gives up a pool, though outputs of that graph may still lie in it.
        """
        if self.engine.device.type != "cuda":
            return None
        alive = next(iter(self.held.values()), None)
        return torch.cuda.graph_pool_handle() if alive is None else alive.graph.pool()

    def _run(self, step: Step, captured: Captured, values: Values) -> Any:
        def launch() -> None:
            for name, tensor in tensors_of(values).items():
                captured.inputs[name].copy_(tensor)
            captured.graph.replay()

        timed, captured.is_fresh = not captured.is_fresh, False
        self.engine.run(step, captured.side, launch, guessing=captured.variant.guessing, timed=timed)
        return copied(captured.outputs, values["past_key_values"])


def recorded(step: Capture) -> tuple[Any, Any]:
    """A graph of a step, and the outputs that it writes; nothing runs yet."""
    cuda: Any = torch.cuda
    graph = cuda.CUDAGraph()
    # Other threads may use the device meanwhile: what they do is not part of it.
    stream = step.side.another_stream()  # torch's own for this is of the device that was captured on first
    with (
        _without_garbage_collection(),
        cuda.graph(graph, pool=step.pool, stream=stream, capture_error_mode="thread_local"),
    ):
        outputs = step()
    return graph, outputs


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Collect garbage first, and none inside: a model that was dropped waits for the device, which ends a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """A stream of its own, as what comes before a capture must have; a device without streams needs none."""
    if device.type != "cuda":
        yield
        return
    cuda: Any = torch.cuda
    stream = cuda.Stream(device)
    stream.wait_stream(cuda.current_stream(device))
    try:
        with cuda.stream(stream):
            yield
    finally:
        cuda.current_stream(device).wait_stream(stream)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which kernels and streams are those of a device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
