"""A recorded workload: which experts every token used in every MoE layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hotset.checks import choice, number, put, renamed, shown, whole
from hotset.errors import TraceError
from hotset.shape import ModelShape
from hotset.trace.event import Event, Phase
from hotset.trace.run import altered

if TYPE_CHECKING:
    from hotset.trace.events import EventTable

NONE = -1
"""Marks an unused place in `experts` and `predictions`: a layer not computed, or fewer experts than top_k."""

ARRAYS = ("experts", "request", "step", "phase", "weights", "token_ids", "predictions")

Labels = tuple[dict[str, str], ...]


@renamed(guesses="predictions")
@dataclass(frozen=True, eq=False)
class Trace:
    """The routing of a workload, token by token; tokens of one forward pass share a step."""

    shape: ModelShape
    experts: npt.NDArray[np.int16]  # [tokens, layers, top_k]
    request: npt.NDArray[np.int32]  # [tokens], numbered from 0 without gaps
    step: npt.NDArray[np.int32]  # [tokens], never falling
    phase: npt.NDArray[np.uint8]  # [tokens], of Phase
    weights: npt.NDArray[np.float16] | None = None  # as experts
    token_ids: npt.NDArray[np.int32] | None = None  # [tokens]
    predictions: npt.NDArray[np.int16] | None = None  # [tokens, layers, distances, width]
    labels: Labels = ()  # one per request, or none at all
    meta: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from hotset.trace.validate import validate

        put(
            self, **{name: np.asarray(array) for name in ARRAYS if isinstance(array := getattr(self, name), np.ndarray)}
        )
        validate(self)

    @property
    def tokens(self) -> int:
        """The number of tokens recorded."""
        return len(self.experts)

    @property
    def requests(self) -> int:
        """The number of requests recorded."""
        return int(self.request.max()) + 1

    @property
    def steps(self) -> int:
        """The number of forward passes recorded."""
        return 1 + int(np.count_nonzero(np.diff(self.step)))

    def events(self) -> EventTable:
        """All events of the trace as arrays, in the order in which a model would raise them."""
        from hotset.trace.events import build_events

        self.check_again()
        return build_events(self)

    def check_again(self) -> None:
        """Raise TraceError if the arrays were written to since, in a way that a loop over them could not stand."""
        from hotset.trace.validate import check_again

        check_again(self)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events())

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace file; a file that is not a valid trace raises TraceError."""
        from hotset.trace.format import load_trace

        return load_trace(Path(path))

    def save(self, path: str | Path) -> None:
        """Write the trace as a safetensors file, whole or not at all."""
        from hotset.trace.format import save_trace

        save_trace(self, Path(path))

    def rows(self, rows: npt.NDArray[Any] | slice) -> dict[str, Any]:
        """Every array that there is, of some tokens only."""
        return {name: array[rows] for name in ARRAYS if (array := getattr(self, name)) is not None}

    def take(self, rows: npt.NDArray[Any] | slice) -> Trace:
        """The trace of some tokens only, given by index, mask or slice; requests are numbered anew."""
        try:
            request = self.request[rows]
        except (IndexError, TypeError, ValueError) as error:
            raise TraceError(f"tokens are taken by index, mask or slice, not by {shown(rows)} ({error})") from None
        if np.ndim(request) != 1 or len(request) == 0:
            raise TraceError("no tokens are left: widen the selection")
        kept, renumbered = np.unique(request, return_inverse=True)
        whole_run = len(request) == self.tokens and np.array_equal(np.arange(self.tokens)[rows], np.arange(self.tokens))
        return replace(
            self,
            meta=self.meta if whole_run else altered(self.meta, "tokens of the run were left out"),
            **self.rows(rows) | {"request": renumbered.astype(np.int32), "step": dense_steps(self.step[rows])},
            labels=tuple(self.labels[r] for r in kept) if self.labels else (),
        )

    def select(self, requests: Sequence[int] | npt.NDArray[Any]) -> Trace:
        """The trace of the given requests only, in their recorded order."""
        self.check_again()
        wanted = np.asarray(requests)
        if wanted.dtype.kind not in "iu" and wanted.size:
            raise TraceError(f"requests are chosen by their numbers, not by {shown(requests)}")
        unknown = np.setdiff1d(wanted, np.arange(self.requests))
        if unknown.size:
            raise TraceError(f"there is no request {unknown[0]}: the trace has 0 to {self.requests - 1}")
        return self.take(np.isin(self.request, wanted))

    def split(self, fraction: float = 0.5, seed: int = 0) -> tuple[Trace, Trace]:
        """Two traces of disjoint requests, drawn at random: fit on the first, judge on the second."""
        if not 0 < number(fraction, "the fraction", 0, 1, TraceError) < 1:
            raise TraceError(f"the fraction must be between 0 and 1, not {fraction}")
        whole(seed, "the seed", 0, (1 << 63) - 1, TraceError)
        self.check_again()
        if self.requests < 2:
            raise TraceError("a trace of one request cannot be split by request: record more, or cut it by tokens")
        first = min(max(round(fraction * self.requests), 1), self.requests - 1)
        order = np.random.default_rng(seed).permutation(self.requests)
        return self.select(order[:first]), self.select(order[first:])

    def with_expert_bytes(self, expert_bytes: int) -> Trace:
        """The same trace with the size of one expert stated."""
        return replace(self, shape=replace(self.shape, expert_bytes=expert_bytes))

    def to_pandas(self) -> Any:
        """A data frame with a row for each expert of each token and layer; needs pandas."""
        from hotset.trace.frame import trace_frame

        return trace_frame(self)

    def __repr__(self) -> str:
        shape, more = self.shape, [name for name in ARRAYS[4:] if getattr(self, name) is not None]
        parts = [
            f"{self.tokens:,} tokens of {self.requests:,} requests in {self.steps:,} steps",
            f"{shape.layers} layers x {shape.experts} experts, top {shape.top_k}",
            *([f"with {', '.join(more)}"] if more else []),
        ]
        return f"<Trace: {'; '.join(parts)}>"

    def count(self, phase: Phase) -> int:
        """The number of tokens of one phase."""
        return int(np.count_nonzero(self.phase == choice(phase, Phase, "the phase", TraceError)))


def dense_steps(step: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Number the steps from 0 without gaps, keeping their order."""
    return np.append(0, np.cumsum(np.diff(step) != 0)).astype(np.int32)
