"""How every expert is used, kept while the model runs: arrays that compiled code adds to, one event at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hotset.policies.base import EventView, compiled
from hotset.profile.statistics import NEVER, Counts, Grid
from hotset.shape import ModelShape
from hotset.trace import Phase

HALF_LIFE_TOKENS = 64.0
"""Of the decayed rate: long enough to mean something at 8 of 128 experts, short enough to follow a conversation."""
BUCKETS, BUCKET_TOKENS = 8, 32
WINDOW_TOKENS = BUCKETS * BUCKET_TOKENS
"""The sliding window: it moves by a bucket at a time, so it holds the last 225 to 256 tokens."""
LOGGED_PASSES = 32
"""Decode passes that the log holds before the shadows must take them over."""


USES, HITS, MISSES = 0, 1, 2
LOG_HEADER, LOG_FIELDS = 3, 5


class Usage(NamedTuple):
    """The statistics of a running cache, and a log of its last events; few arrays, as each costs time at every call."""

    counts: Any  # int64 [3, phases, layers, experts]: tokens that used it, events that found it, events that did not
    recent: Any  # float64 [layers, experts], decayed uses as of the last one
    used_at: Any  # int64 [layers, experts], the layer's tokens at the last use, or NEVER
    tokens: Any  # int64 [layers], tokens seen
    window: Any  # int32 [layers, BUCKETS, experts]
    log: Any  # int32: events, end, events left out; then layer, tokens, phase, request, size, experts, counts of each


def make_usage(shape: ModelShape) -> Usage:
    """Statistics of a cache that has served nothing."""
    grid = (shape.layers, shape.experts)
    # Room for the decode passes, then for one prompt: the monitor reads the log between passes.
    entries = (
        (LOGGED_PASSES + 2) * LOG_FIELDS * shape.layers
        + 2 * LOGGED_PASSES * shape.token_cycle
        + 4 * shape.total_experts
    )
    log = np.zeros(LOG_HEADER + entries, np.int32)
    log[1] = LOG_HEADER
    return Usage(
        counts=np.zeros((3, len(Phase), *grid), np.int64),
        recent=np.zeros(grid),
        used_at=np.full(grid, NEVER, np.int64),
        tokens=np.zeros(shape.layers, np.int64),
        window=np.zeros((shape.layers, BUCKETS, shape.experts), np.int32),
        log=log,
    )


@compiled
def track(usage: Usage, event: EventView, loads: Any, missing: int) -> None:
    """Take in one event that was served; the first rows of loads name what was missing."""
    layer, phase = event.layer, event.phase
    now = usage.tokens[layer] + event.tokens
    bucket = _bucket(usage, layer, now)
    usage.tokens[layer] = now
    # A prompt's uses are taken as spread evenly over its tokens, the older of which have faded by its end.
    weight = _decayed(float(event.tokens)) / event.tokens if event.tokens > 1 else 1.0
    for i in range(len(event.experts)):
        expert, count = np.uintp(event.experts[i]), event.counts[i]
        usage.counts[USES, phase, layer, expert] += count
        usage.counts[HITS, phase, layer, expert] += 1
        usage.window[layer, bucket, expert] += count
        age = now - usage.used_at[layer, expert]
        usage.recent[layer, expert] = usage.recent[layer, expert] * 2.0 ** (-age / HALF_LIFE_TOKENS) + count * weight
        usage.used_at[layer, expert] = now
    for row in range(missing):
        expert = np.uintp(loads[row, 0])
        usage.counts[HITS, phase, layer, expert] -= 1
        usage.counts[MISSES, phase, layer, expert] += 1
    _write_down(usage.log, event)


@compiled
def _bucket(usage: Usage, layer: int, now: int) -> int:
    """The bucket of the window for tokens up to `now`, emptied, like those in between, if it is a new one."""
    before, last = (usage.tokens[layer] - 1) // BUCKET_TOKENS, (now - 1) // BUCKET_TOKENS
    for number in range(max(before + 1, last - BUCKETS + 1), last + 1):
        for expert in range(usage.window.shape[2]):
            usage.window[layer, number % BUCKETS, expert] = 0
    return int(last % BUCKETS)


@compiled
def _write_down(log: Any, event: EventView) -> None:
    """Log the event, as long as there is room: a log that is never read ends, and says that it did."""
    at, size = log[1], len(event.experts)
    if log[2] or at + LOG_FIELDS + 2 * size > len(log):
        log[2] += 1
        return
    log[at] = event.layer
    log[at + 1] = event.tokens
    log[at + 2] = event.phase
    log[at + 3] = event.request
    log[at + 4] = size
    first = at + LOG_FIELDS
    for i in range(size):
        log[first + i] = event.experts[i]
        log[first + size + i] = event.counts[i]
    log[0] += 1
    log[1] = first + 2 * size


@compiled
def _decayed(tokens: float) -> Any:
    """What so many tokens in a row are worth at their end, the last one counting as one."""
    return (1.0 - 2.0 ** (-tokens / HALF_LIFE_TOKENS)) / (1.0 - 2.0 ** (-1.0 / HALF_LIFE_TOKENS))


def rates(usage: Usage) -> Grid:
    """The decayed probability that a token of its layer uses each expert."""
    now = usage.tokens[:, None]
    faded = usage.recent * 2.0 ** (-(now - usage.used_at) / HALF_LIFE_TOKENS)
    lived = (1 - 2.0 ** (-now / HALF_LIFE_TOKENS)) / (1 - 2.0 ** (-1 / HALF_LIFE_TOKENS))
    found: Grid = np.divide(faded, lived, out=np.zeros_like(faded), where=lived > 0)
    return found


def window_counts(usage: Usage) -> Counts:
    """Uses of each expert by the last tokens of its layer."""
    counts: Counts = usage.window.sum(axis=1, dtype=np.int64)
    return counts


def ages(usage: Usage) -> Counts:
    """Tokens of its layer since each expert was last used."""
    found: Counts = np.where(usage.used_at == NEVER, NEVER, usage.tokens[:, None] - usage.used_at)
    return found
