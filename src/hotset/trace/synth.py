"""Synthetic routing with the habits of real routing: popular experts, topics, neighbours that are alike."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.checks import number, whole
from hotset.compiling import keep_compiled
from hotset.errors import HotsetError
from hotset.shape import ModelShape
from hotset.trace.event import Phase
from hotset.trace.trace import Trace

_BLOCK_VALUES = 1 << 21
_MAX_ENTRIES = 1 << 31
_COUNTS = {"requests": 1, "prompt_tokens": 0, "new_tokens": 1, "topics": 1, "seed": 0}
_NUMBERS = {
    **dict.fromkeys(("locality", "drift", "topic_stay", "switch"), (0, 1)),
    **dict.fromkeys(("skew", "topic_strength", "noise", "slow"), (0, 100)),
    "slow_tokens": (1, 1e6),
}

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthConfig:
    """The parameters of the synthetic router; the logits of all parts add up, and the top_k largest win."""

    layers: int = 16
    experts: int = 64
    top_k: int = 8
    expert_bytes: int | None = None
    requests: int = 64
    prompt_tokens: int = 32  # mean per request; 0 records no prefill
    new_tokens: int = 96  # mean per request
    topics: int = 6
    skew: float = 0.45  # spread of the popularity that all requests share
    topic_strength: float = 0.7  # spread of what one topic adds
    noise: float = 1.0  # spread of what changes from token to token
    locality: float = 0.3  # correlation of that noise between neighbouring tokens
    slow: float = 0.4  # spread of what changes along a passage
    slow_tokens: float = 16.0  # length of a passage: the time constant of that change
    drift: float = 0.03  # share of the popularity that each request renews
    topic_stay: float = 0.7  # probability that a request keeps the topic of the one before
    switch: float = 0.0  # probability that the topic changes before a token of the same request
    seed: int = 0

    def __post_init__(self) -> None:
        self.shape()
        for name, least in _COUNTS.items():
            whole(getattr(self, name), name, least, _MAX_ENTRIES)
        for name, (low, high) in _NUMBERS.items():
            number(getattr(self, name), name, low, high)
        entries = self.requests * (self.prompt_tokens + self.new_tokens) * self.layers * self.top_k
        if entries > _MAX_ENTRIES:
            raise HotsetError(
                f"this workload would take {entries:,} routing entries, the most is {_MAX_ENTRIES:,}: "
                "ask for fewer requests or shorter ones"
            )

    def shape(self) -> ModelShape:
        """The shape of the model that is imitated."""
        return ModelShape(self.layers, self.experts, self.top_k, self.expert_bytes)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SynthConfig:
        """Build a config from plain values, such as those of a JSON file; an unknown key is an error."""
        known = [item.name for item in fields(cls)]
        for key in values:
            if key not in known:
                raise HotsetError(f'"{key}" is not a parameter of the synthetic model; it has {", ".join(known)}')
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The parameters as plain values, as `from_dict` reads them."""
        return asdict(self)


def synthesise(config: SynthConfig) -> Trace:
    """Draw the trace of a config: the same config gives the same bytes."""
    prompt, new = _lengths(config, _Draw.PROMPT), _lengths(config, _Draw.NEW)
    topic = _request_topics(config)
    experts, weights = _route_requests(config, prompt + new, topic)
    phase, step = _passes(prompt, new)
    return Trace(
        shape=config.shape(),
        experts=experts,
        weights=weights,
        request=np.repeat(np.arange(config.requests, dtype=np.int32), prompt + new),
        phase=phase,
        step=step,
        labels=tuple({"topic": str(number)} for number in topic),
        meta={"source": "synthetic", "config": json.dumps(config.to_dict())},
    )


class _Draw(IntEnum):
    """What a random number decides; each has its own stream, so that one parameter does not stir the rest."""

    PROMPT = 0
    NEW = 1
    TOPIC = 2
    SWITCH = 3
    POPULARITY = 4
    TOPIC_LOGITS = 5
    FAST = 6
    SLOW = 7


def _stream(config: SynthConfig, draw: _Draw, index: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(config.seed, spawn_key=(draw, index))))


def _lengths(config: SynthConfig, draw: _Draw) -> npt.NDArray[np.int64]:
    """Exponential lengths above an eighth of the mean, one from each quantile: even a few have that mean."""
    mean = config.prompt_tokens if draw is _Draw.PROMPT else config.new_tokens
    least = max(min(mean, 1), mean // 8)
    spread = -np.log1p(-(np.arange(config.requests) + 0.5) / config.requests)
    lengths = least + np.rint((mean - least) * spread / spread.mean()).astype(np.int64)
    return _stream(config, draw).permutation(lengths)


def _request_topics(config: SynthConfig) -> npt.NDArray[np.int64]:
    drawn = _stream(config, _Draw.TOPIC).random((config.requests, 2))
    moves = drawn[:, 0] >= config.topic_stay
    moves[0] = True
    walk: npt.NDArray[np.int64] = _walk_topics(moves, drawn[:, 1], config.topics, 0)
    return walk


def _token_topics(config: SynthConfig, tokens: int, request: int, first: int) -> npt.NDArray[np.int64]:
    if config.switch == 0.0:
        return np.full(tokens, first, np.int64)
    drawn = _stream(config, _Draw.SWITCH, request).random((tokens, 2))
    moves = drawn[:, 0] < config.switch
    walk: npt.NDArray[np.int64] = _walk_topics(moves, drawn[:, 1], config.topics, first)
    return walk


def _passes(
    prompt: npt.NDArray[np.int64], new: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Phase and step of every token: one forward pass for a whole prompt, one for each new token."""
    both = np.stack([prompt, new], axis=1).reshape(-1)
    phase = np.repeat(np.tile(np.array([Phase.PREFILL, Phase.DECODE], np.uint8), len(prompt)), both)
    starts = phase == Phase.DECODE
    starts[(np.cumsum(both) - both)[both > 0]] = True
    return phase, (np.cumsum(starts) - 1).astype(np.int32)


def _route_requests(
    config: SynthConfig, lengths: npt.NDArray[np.int64], topic: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.float16]]:
    """Route every request in turn; only one block of noise is held at a time."""
    size = (int(lengths.sum()), config.layers, config.top_k)
    experts, weights = np.empty(size, np.int16), np.empty(size, np.float16)
    topics = (config.topics, config.layers, config.experts)
    topic_logits = _stream(config, _Draw.TOPIC_LOGITS).standard_normal(topics, np.float32)
    topic_logits *= np.float32(config.topic_strength)
    popularity, end = _popularity(config, 0, None), np.cumsum(lengths)
    for request in range(config.requests):
        if request:
            popularity = _popularity(config, request, popularity)
        own = slice(end[request] - lengths[request], end[request])
        of_token = _token_topics(config, int(lengths[request]), request, int(topic[request]))
        _route_request(config, request, popularity + topic_logits, of_token, experts[own], weights[own])
    return experts, weights


def _popularity(config: SynthConfig, request: int, before: Floats | None) -> Floats:
    """The shared logits of a request: part of them is renewed, their spread stays."""
    size = (config.layers, config.experts)
    if before is not None and config.drift == 0.0:
        return before
    fresh = _stream(config, _Draw.POPULARITY, request).standard_normal(size, np.float32)
    fresh *= np.float32(config.skew)
    if before is None:
        return fresh
    return before * np.float32(math.sqrt(1.0 - config.drift**2)) + fresh * np.float32(config.drift)


def _route_request(
    config: SynthConfig,
    request: int,
    logits: Floats,
    topic: npt.NDArray[np.int64],
    experts: npt.NDArray[np.int16],
    weights: npt.NDArray[np.float16],
) -> None:
    streams = [_stream(config, draw, request) for draw in (_Draw.FAST, _Draw.SLOW)]
    size = (config.layers, config.experts)
    state = np.stack([stream.standard_normal(size, np.float32) for stream in streams])
    block = max(1, _BLOCK_VALUES // (config.layers * config.experts))
    for start in range(0, len(topic), block):
        rows = slice(start, start + block)
        fast, slow = (stream.standard_normal((len(topic[rows]), *size), np.float32) for stream in streams)
        chosen = np.empty(experts[rows].shape, np.float32)
        _route_block(logits, topic[rows], state, fast, slow, _gains(config), experts[rows], chosen)
        weights[rows] = _softmax(chosen)


def _gains(config: SynthConfig) -> Floats:
    """How much of a noise stays, how much is renewed, and its spread: a row each for fast and slow."""
    slow_stay = math.exp(-1.0 / config.slow_tokens)
    rows = [
        (config.locality, math.sqrt(1.0 - config.locality**2), config.noise),
        (slow_stay, math.sqrt(1.0 - slow_stay**2), config.slow),
    ]
    return np.array(rows, np.float32)


def _softmax(logits: Floats) -> npt.NDArray[np.float16]:
    """In float64, so that the last bit of a platform's exp does not reach the rounded weight."""
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=2, keepdims=True))
    shares: npt.NDArray[np.float64] = powers / powers.sum(axis=2, keepdims=True)
    return shares.astype(np.float16)


@keep_compiled(nogil=True)
def _walk_topics(moves: Any, drawn: Any, topics: int, first: int) -> Any:
    """Follow the topic: at each move it becomes one of the others, all alike."""
    walk = np.empty(len(moves), np.int64)
    topic = first
    for i in range(len(moves)):
        if moves[i] and topics > 1:
            topic = (topic + 1 + int(drawn[i] * (topics - 1))) % topics
        walk[i] = topic
    return walk


@keep_compiled(nogil=True)
def _route_block(
    logits: Any, topic: Any, state: Any, fast: Any, slow: Any, gains: Any, experts: Any, chosen: Any
) -> None:
    """Advance both noises by one token at a time and choose the top_k of every layer."""
    layers, count = fast.shape[1], fast.shape[2]
    scores = np.empty(count, np.float32)
    for token in range(len(topic)):
        for layer in range(layers):
            for e in range(count):
                near = gains[0, 0] * state[0, layer, e] + gains[0, 1] * fast[token, layer, e]
                far = gains[1, 0] * state[1, layer, e] + gains[1, 1] * slow[token, layer, e]
                state[0, layer, e], state[1, layer, e] = near, far
                scores[e] = logits[topic[token], layer, e] + gains[0, 2] * near + gains[1, 2] * far
            _choose(scores, experts[token, layer], chosen[token, layer])


@keep_compiled(nogil=True)
def _choose(scores: Any, experts: Any, chosen: Any) -> None:
    """Fill in the largest scores in falling order; of equals, the lower number wins."""
    top_k, filled = len(experts), 0
    for e in range(len(scores)):
        if filled == top_k and scores[e] <= chosen[top_k - 1]:
            continue
        at = min(filled, top_k - 1)
        while at > 0 and scores[e] > chosen[at - 1]:
            chosen[at], experts[at] = chosen[at - 1], experts[at - 1]
            at -= 1
        chosen[at], experts[at] = scores[e], e
        filled = min(filled + 1, top_k)
