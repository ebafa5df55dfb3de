"""Streams: the requests under way side by side, the passes of each, and where each was at such a place before.

A token of a request is a pass of its stream. The set of experts that it chose in the first layer stands for what it is:
where a stream was last when such a token came, alone or after such another, says what may follow.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hotset.policies.base import EventView, compiled, compiled_unchecked

PLACES = 1 << 16
"""Hashes of signatures, and of pairs of them."""
FAR = 16
"""Passes after a place that was met before which say what follows."""
PROMPT_TOKENS = 64
"""The last tokens of a prompt that are passes; those before count in the rates."""


@compiled
def find_streams(state: Any, event: EventView) -> int:
    """Give every token's request a stream, and begin a pass where one begins; return how many streams there are."""
    live, ticked = 0, False
    for token in range(len(event.requests)):
        stream = assign_stream(state, event, event.requests[token])
        live += state.turn[stream] != event.tick
        state.turn[stream] = event.tick
    for stream in range(len(state.owner)):
        if state.turn[stream] != event.tick:
            continue
        if event.layer <= state.at[stream]:
            if event.phase == 1 and not ticked:
                ticked = True
                state.clock[0] += 1
            begin_pass(state, event, stream)
        state.at[stream] = event.layer
    return live


@compiled
def stream_of(state: Any, request: int) -> int:
    """The stream that a request has, or shares since there are more requests than streams."""
    for stream in range(len(state.owner)):
        if state.owner[stream] == request:
            return stream
    return request % len(state.owner)


@compiled
def assign_stream(state: Any, event: EventView, request: int) -> int:
    """The stream of a request; a new one takes that which was served longest ago, or shares one if all are busy."""
    found = stream_of(state, request)
    if state.owner[found] == request:
        return found
    oldest = 0
    for stream in range(len(state.owner)):
        if state.turn[stream] < state.turn[oldest]:
            oldest = stream
    if state.turn[oldest] == event.tick:
        return found
    state.owner[oldest] = request
    state.at[oldest] = 1 << 30
    state.gap[oldest] = 1.0
    state.last[oldest] = 0
    for layer in range(state.begins.shape[1]):
        state.begins[oldest, layer] = 1
    return oldest


@compiled
def begin_pass(state: Any, event: EventView, stream: int) -> None:
    """Count the passes of a stream that begin with this event, and find where it was at such places before."""
    if event.phase == 1:
        if state.last[stream] > 0:
            state.gap[stream] += 0.25 * (state.clock[0] - state.last[stream] - state.gap[stream])
        state.last[stream] = state.clock[0]
    several, tokens = len(event.requests) > 1, 0
    for token in range(len(event.requests)):
        tokens += not several or stream_of(state, event.requests[token]) == stream
    skipped = tokens - followed_tokens(state, event, tokens)
    state.first[stream] = state.passes[stream] + 1
    begins = state.begins[stream, event.layer] == 1
    for token in range(len(event.requests)):
        if several and stream_of(state, event.requests[token]) != stream:
            continue
        if skipped > 0:
            skipped -= 1
            begins = True  # what was there before was not followed
            continue
        note_place(state, event, stream, token, begins)
        begins = False


@compiled
def followed_tokens(state: Any, event: EventView, tokens: int) -> int:
    """Of so many tokens of a stream, how many are taken one by one: the end of a prompt, and one of a decode step."""
    return min(tokens, min(PROMPT_TOKENS, state.history.shape[1]) if event.phase == 0 else 1)


@compiled
def note_place(state: Any, event: EventView, stream: int, token: int, begins: bool) -> None:
    """Count a pass, empty its part of the ring, and find where its signature and pair were met before."""
    streams, length = len(state.owner), state.history.shape[1]
    before = state.signature[stream, state.passes[stream] % length]
    state.passes[stream] += 1
    at = state.passes[stream] % length
    ring = state.history[stream, at]
    for layer in range(ring.shape[0]):
        for k in range(ring.shape[1]):
            ring[layer, k] = -1
    own = signature(event, token)
    here = state.passes[stream] * streams + stream
    state.signature[stream, at] = own
    state.found[stream, at, 0] = state.places[0, own]
    state.found[stream, at, 1] = 0
    state.places[0, own] = here
    if before >= 0 and not begins:
        pair = (before * 7919 + own) % PLACES
        state.found[stream, at, 1] = state.places[1, pair]
        state.places[1, pair] = here


@compiled
def signature(event: EventView, token: int) -> int:
    """A hash of the set of experts that a token chose."""
    total, product = 0, 1
    for k in range(event.routes.shape[1]):
        mixed = ((event.routes[token, k] + 1) * 2654435761) & 0xFFFFFFFF
        mixed ^= mixed >> 15
        total += mixed
        product = (product * (mixed | 1)) & 0xFFFFFFFF
    return int(((total ^ (product >> 7)) * 40503 >> 4) % PLACES)


@compiled_unchecked
def recall(state: Any, x: Any, first: int, layer: int, place: int, here: int) -> None:
    """Mark the experts that were used after a place, in the rows of `x` from `first` on: next, soon, and later."""
    streams, length = len(state.owner), state.history.shape[1]
    stream, at = place % streams, place // streams
    if state.passes[stream] - at >= length - 1:
        return  # written over since
    last = here // streams - 1 if here % streams == stream else state.passes[stream]
    for j in range(1, min(FAR, last - at) + 1):
        experts = state.history[stream, (at + j) % length, layer]
        for k in range(len(experts)):
            if experts[k] < 0:
                continue
            if j == 1:
                x[first, experts[k]] += np.float32(1.0)
            elif j < 5:
                x[first + 1, experts[k]] += np.float32(0.333)
            else:
                x[first + 2, experts[k]] += np.float32(0.125)
