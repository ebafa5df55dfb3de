"""What makes a trace valid; nothing else ever reaches a policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hotset.checks import instance
from hotset.errors import TraceError
from hotset.shape import ModelShape

if TYPE_CHECKING:
    from hotset.trace.trace import Trace

_PLACES_AT_ONCE = 1 << 19
OPTIONAL = {"weights", "token_ids", "predictions"}


def validate(trace: Trace) -> None:
    """Raise TraceError, naming the first fault, unless every part of the trace is sound."""
    instance(trace.shape, ModelShape, "the shape of a trace", TraceError)
    _check_text(trace)
    check_again(trace)
    for rows in _blocks(trace.experts):
        _check_distinct(trace, rows)
        weights = None if trace.weights is None else trace.weights[rows]
        if weights is not None and not ((weights >= 0) & (weights < np.inf)).all():
            raise TraceError("a router weight is negative, infinite or not a number")


def check_again(trace: Trace) -> None:
    """Look once more at what compiled loops rely on: the maker of the arrays may have written to them since."""
    _check_types(trace)
    _check_shapes(trace)
    for rows in _blocks(trace.experts):
        _check_range(trace.experts[rows], trace.shape.experts, "expert", rows.start)
    _check_columns(trace)
    if trace.predictions is not None:
        for rows in _blocks(trace.predictions):
            _check_range(trace.predictions[rows], trace.shape.experts, "predicted expert", rows.start)


def _blocks(array: npt.NDArray[Any]) -> Iterator[slice]:
    """Slices of tokens, so that checking takes little memory beside a large trace."""
    tokens = max(1, _PLACES_AT_ONCE * len(array) // array.size)
    for start in range(0, len(array), tokens):
        yield slice(start, start + tokens)


def _check_shapes(trace: Trace) -> None:
    shape, tokens = trace.shape, len(trace.experts) if trace.experts.ndim else 0
    if tokens == 0:
        raise TraceError("the trace holds no tokens: record at least one")
    _expect(trace.experts, "experts", (tokens, shape.layers, shape.top_k))
    for name in ("request", "step", "phase"):
        _expect(getattr(trace, name), name, (tokens,))
    if trace.weights is not None:
        _expect(trace.weights, "weights", trace.experts.shape)
    if trace.token_ids is not None:
        _expect(trace.token_ids, "token_ids", (tokens,))
    if trace.predictions is not None:
        sides = trace.predictions.shape
        if len(sides) != 4 or sides[:2] != (tokens, shape.layers) or 0 in sides:
            raise TraceError(f"predictions has shape {sides}, not (tokens, layers, distances, width)")


def _check_types(trace: Trace) -> None:
    wanted = {
        "experts": np.int16, "request": np.int32, "step": np.int32, "phase": np.uint8,
        "weights": np.float16, "token_ids": np.int32, "predictions": np.int16,
    }  # fmt: skip
    for name, dtype in wanted.items():
        array = getattr(trace, name)
        if array is None and name in OPTIONAL:
            continue
        if not isinstance(array, np.ndarray):
            raise TraceError(f"{name} is {type(array).__name__}, it must be a numpy array")
        if array.dtype != dtype:
            raise TraceError(f"{name} is {array.dtype}, it must be {np.dtype(dtype)}")


def _expect(array: npt.NDArray[Any], name: str, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise TraceError(f"{name} has shape {array.shape}, but the trace needs {shape}")


def _check_distinct(trace: Trace, rows: slice) -> None:
    ordered = np.sort(trace.experts[rows], axis=2)
    twice = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)
    if twice.any():
        token, layer = (int(i) for i in np.argwhere(twice)[0][:2])
        raise TraceError(f"token {rows.start + token}, layer {layer} names the same expert twice")


def _check_range(block: npt.NDArray[Any], experts: int, what: str, first_token: int) -> None:
    if block.min() < -1 or block.max() >= experts:
        wrong = (block < -1) | (block >= experts)
        where = np.argwhere(wrong)[0]
        value = int(block[tuple(where)])
        raise TraceError(
            f"{what} {value} at token {first_token + int(where[0])}, layer {int(where[1])} is out of range: "
            f"the model has experts 0 to {experts - 1}"
        )


def _check_columns(trace: Trace) -> None:
    if (np.diff(trace.step) < 0).any():
        raise TraceError("step falls along the trace; tokens must be in the order of their forward passes")
    if trace.phase.max() > 1:
        raise TraceError(f"phase is {int(trace.phase.max())} somewhere; it must be 0 (prefill) or 1 (decode)")
    if trace.request.min() < 0 or trace.request.max() >= trace.tokens:
        raise TraceError("request numbers must start at 0 and leave no gaps")
    if (np.bincount(trace.request) == 0).any():
        raise TraceError("request numbers must start at 0 and leave no gaps")
    if trace.labels and len(trace.labels) != trace.requests:
        raise TraceError(f"{len(trace.labels)} labels for {trace.requests} requests; give one each, or none")


def _check_text(trace: Trace) -> None:
    """Labels and meta are shown to people and written to files, so they must be proper text."""
    if not isinstance(trace.labels, tuple):
        raise TraceError("labels must be a tuple of dictionaries, one per request")
    for words in (*trace.labels, trace.meta):
        if not isinstance(words, dict):
            raise TraceError("labels and meta must be dictionaries of text")
        for word in (*words, *words.values()):
            if not isinstance(word, str):
                raise TraceError(f"labels and meta must be text, not {type(word).__name__}")
            if not word.isascii() and any("\ud800" <= letter <= "\udfff" for letter in word):
                raise TraceError(f"{ascii(word)[:60]} in labels or meta is not valid Unicode")
