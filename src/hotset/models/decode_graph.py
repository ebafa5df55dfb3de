"""Which calls of a transformers model are decode steps that the device can drive, and how these are captured."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from hotset.engine.device.capture import Capture, CapturedStep, CapturedSteps
from hotset.engine.device.decode import DeviceDecode
from hotset.engine.device.variant import Variant
from hotset.engine.driver import Driver
from hotset.engine.step import Step
from hotset.engine.support import MAX_TOKENS, DeviceSupport
from hotset.errors import HotsetError, StopAsked
from hotset.models.call_values import cloned, copied, drop_cache, is_plain, set_lengths, signature_of, tensors_of
from hotset.models.generate_hook import GenerateHook
from hotset.models.patches import Undo, replace_calls, small_parts_fused
from hotset.models.static_caches import KVCachePool, is_static
from hotset.models.tracker import StepTracker
from hotset.text import one_line
from hotset.trace import Phase

Tensor = torch.Tensor
Values = dict[str, Any]


class DecodeGraphs:
    """Stands in for a model's forward and generate: decode steps are replayed, all else is the host's.

    What cannot be captured takes the host path, from then on; where the device is `demanded`, that is an error.
    """

    def __init__(
        self,
        model: Any,
        decode: DeviceDecode,
        tracker: StepTracker,
        caches: KVCachePool,
        *,
        warn: Callable[[str], Any] = lambda _: None,
        demanded: bool = False,
    ) -> None:
        self.model, self.decode, self.tracker, self.caches = model, decode, tracker, caches
        self.warn, self.demanded = warn, demanded
        self.forward: Callable[..., Any] = model.forward
        self.signature = inspect.signature(self.forward)
        self.hook = GenerateHook(model, caches, warn)
        self.held = CapturedSteps()
        self.unsupported_reason: str | None = None  # the device does not drive any more
        self._told: set[int | str] = set()  # sizes of batches that were too large, and what keeps the device from steps

    def install(self) -> Undo:
        """Take the place of the model's forward and generate; returns what ends it."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        plain: Any = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
        plain.__signature__ = self.signature  # generate() looks at it
        undo = replace_calls(self.model, plain, self.hook.generate)
        self.caches.open()

        def remove() -> None:
            undo()
            self.held.clear()
            self.caches.close()

        return remove

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step: of decode it is replayed, or captured first; anything else takes the host path."""
        step = self.tracker.current()
        values = kwargs if not args else dict(self.signature.bind(*args, **kwargs).arguments)
        device = self.decode.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            if self._may(step, values):
                with self.decode.guard.lock:  # nothing may change the cache between a look at it and the launch
                    captured = self._captured(step, values) if self._can() else None
                    if captured is not None:
                        outputs = self.decode.run(step, captured, tensors_of(values))
                        return copied(outputs, values["past_key_values"])
            return self.forward(*args, **kwargs)

    def _may(self, step: Step, values: Values) -> bool:
        """Whether a call is a step that could be captured."""
        ids = values.get("input_ids")
        return (
            self.unsupported_reason is None
            and step.phase is Phase.DECODE
            and isinstance(ids, Tensor)
            and ids.device.type == self.decode.device.type
            and ids.shape[1:] == (1,)
            and not self.hook.reordering.under_way
            # it keeps copies of weights, which a graph would outlive
            and not torch.is_autocast_enabled(ids.device.type)
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
            self.warn("the host drives steps whose gradients may be asked for: decode under torch.no_grad()")
        return True

    def _fits(self, tokens: int) -> bool:
        """Whether the device serves so many tokens at once; says once, of each number, what it lacks to do so."""
        plan, policy = self.decode.cache.controller.plan, self.decode.cache.controller.policy
        reasons = DeviceSupport.check_batch(tokens, plan.shape, plan.staging, policy)
        if reasons and tokens <= MAX_TOKENS and tokens not in self._told:
            self._told.add(tokens)
            self.warn(f"the host drives batches of {tokens}: {reasons[0]}")
        return not reasons

    def _can(self) -> bool:
        """Whether the device can take over now; a cache that has changed its policy needs other kernels."""
        if not self.decode.ready:
            return False
        if self.decode.steps.is_outdated:
            self.held.clear()
            self.decode.discard()
            reasons = self.decode.unsupported_reasons()
            if reasons:
                self._give_up(reasons[0])
        return self.unsupported_reason is None

    def _give_up(self, reason: str) -> None:
        """Let the host drive from now on."""
        self.unsupported_reason = reason
        self.held.clear()
        self.caches.close()
        self.decode.discard()
        self.warn(f"the host drives the GPU, for {reason}")

    def _captured(self, step: Step, values: Values) -> CapturedStep | None:
        """The graph for a call; None if there cannot be one."""
        decode = self.decode
        recording = decode.stats.recorder_of(step) is not None
        resident = decode.all_resident
        prefetches = decode.prefetches_in(step) and not resident
        variant = Variant(prefetches, recording, decode.stats.routers if recording else None, resident)
        key = signature_of(values), variant.key, decode.steps.versions
        found = self.held.find(key, values["past_key_values"])
        if found is None and self.held.is_worth_it():
            self.held.make_room()
            found = self._try_to_capture(step, values, variant)
            if found is not None:
                self.held.add(key, found)
        return found

    def _try_to_capture(self, step: Step, values: Values, variant: Variant) -> CapturedStep | None:
        try:
            return self._capture(step, values, variant)
        except StopAsked:
            raise
        except Exception as error:
            if self.demanded:
                raise HotsetError(
                    f"the device cannot drive this model: its decode could not be captured: {one_line(error)}; "
                    "leave --engine out, or use --engine host"
                ) from error
            reason = one_line(error)
        self._give_up(f"its decode could not be captured: {reason}")
        return None

    def _capture(self, step: Step, values: Values, variant: Variant) -> CapturedStep:
        """Capture a step with inputs of its own; the lengths of its key-value cache stay as they are."""
        device, steps, cache = self.decode.device, self.decode.steps, values["past_key_values"]
        steps.drain()
        kernels = steps.kernels_for(values["input_ids"].shape[0])
        steps.upload()  # a warm-up writes to the rows for prefetch: it must know which these are
        with torch.inference_mode(False), torch.no_grad():
            inputs = {name: cloned(value) for name, value in values.items()}
            lengths = [layer.cumulative_length.clone() for layer in cache.layers]

        def forward(driver: Driver) -> Any:
            return self.tracker.serving(replace(step, driver=driver), lambda: self.forward(**inputs))

        capture = Capture(kernels, variant, forward, lambda: set_lengths(cache, lengths))
        with small_parts_fused(self.model, device), torch.no_grad():
            graph, outputs = capture.record(self.held.pool(device))
        drop_cache(outputs, cache)
        return CapturedStep(graph, tensors_of(inputs), outputs, kernels, variant, weakref.ref(cache))
