"""The rows that the options of `hotset trace cut` name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hotset.errors import TraceError
from hotset.trace.event import Phase

if TYPE_CHECKING:
    from hotset.trace.trace import Trace

_RANGE = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")
_SLICE = re.compile(r"(\d{0,18}):(\d{0,18})")

Mask = npt.NDArray[np.bool_]


def pick_rows(
    trace: Trace,
    *,
    requests: str | None,
    tokens: str | None,
    labels: Sequence[str],
    phase: str | None,
    first: int | None,
) -> npt.NDArray[Any]:
    """The numbers of the tokens that satisfy every option given."""
    if not (requests or tokens or labels or phase or first):
        raise TraceError("nothing to cut: give --requests, --tokens, --label, --phase or --first")
    keep = np.ones(trace.tokens, bool)
    if requests is not None:
        keep &= np.isin(trace.request, _parse_requests(requests, trace.requests))
    if tokens is not None:
        keep &= _token_mask(tokens, trace.tokens)
    if labels:
        keep &= _label_mask(trace, labels)
    if phase is not None:
        keep &= trace.phase == _parse_phase(phase)
    return np.flatnonzero(keep)[:first]


def _parse_requests(text: str, requests: int) -> npt.NDArray[np.int64]:
    wanted = np.zeros(requests, bool)
    for word in text.split(","):
        match = _RANGE.fullmatch(word.strip())
        if not match:
            raise TraceError(f'cannot read the requests "{text}": write numbers and ranges, such as 0-9,20')
        low, high = int(match[1]), int(match[2] or match[1])
        if low > high or high >= requests:
            raise TraceError(f"there are no requests {word.strip()}: the trace has 0 to {requests - 1}")
        wanted[low : high + 1] = True
    return np.flatnonzero(wanted)


def _token_mask(text: str, tokens: int) -> Mask:
    match = _SLICE.fullmatch(text.strip())
    if not match:
        raise TraceError(f'cannot read the tokens "{text}": write FROM:TO, such as 1000:2000')
    low, high = int(match[1] or 0), int(match[2] or tokens)
    if low >= min(high, tokens):
        raise TraceError(f"there are no tokens {text}: the trace has 0 to {tokens - 1}")
    place = np.arange(tokens)
    return (place >= low) & (place < high)


def _label_mask(trace: Trace, wanted: Sequence[str]) -> Mask:
    """Tokens of requests that carry all the labels; several values of one key are alternatives."""
    values: dict[str, set[str]] = {}
    for word in wanted:
        key, equals, value = word.partition("=")
        if not equals:
            raise TraceError(f'cannot read the label "{word}": write KEY=VALUE')
        values.setdefault(key, set()).add(value)
    if unknown := [key for key in values if not any(key in label for label in trace.labels)]:
        known = sorted({key for label in trace.labels for key in label})
        raise TraceError(f"no request has a label {unknown[0]!r}; the trace has {', '.join(known) or 'no labels'}")
    fits = [all(label.get(key) in allowed for key, allowed in values.items()) for label in trace.labels]
    mask: Mask = np.array(fits, bool)[trace.request]
    return mask


def _parse_phase(text: str) -> Phase:
    try:
        return Phase[text.upper()]
    except KeyError:
        raise TraceError(f'the phase must be "prefill" or "decode", not {text!r}') from None
