"""Small traces for tests."""

import numpy as np

from hotset.shape import ModelShape
from hotset.trace import Trace
from hotset.trace.importers._options import number_passes


def make_trace(lengths=(5, 3, 7), prompt=2, layers=3, experts=8, top_k=2, seed=0, **changes):
    """A random trace: each request begins with a prompt of `prompt` tokens."""
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    ids = rng.permuted(np.tile(np.arange(experts, dtype=np.int16), (tokens, layers, 1)), axis=2)[:, :, :top_k]
    request = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    place = np.concatenate([np.arange(length) for length in lengths])
    phase = (place >= prompt).astype(np.uint8)
    parts = {
        "shape": ModelShape(layers, experts, top_k, 1000),
        "experts": np.ascontiguousarray(ids),
        "request": request,
        "step": number_passes(request, phase),
        "phase": phase,
        "weights": rng.random(ids.shape).astype(np.float16),
        "token_ids": rng.integers(0, 99, tokens).astype(np.int32),
        "predictions": rng.integers(-1, experts, (tokens, layers, 2, 3)).astype(np.int16),
        "labels": tuple({"topic": "ab"[i % 2], "id": str(i)} for i in range(len(lengths))),
        "meta": {"model": "tiny"},
    }
    return Trace(**{**parts, **changes})


def same(one, other):
    """Whether two traces hold the same, array by array."""
    for name in ("experts", "request", "step", "phase", "weights", "token_ids", "predictions"):
        a, b = getattr(one, name), getattr(other, name)
        if (a is None) != (b is None) or (a is not None and not np.array_equal(a, b)):
            return False
    return (one.shape, one.labels, one.meta) == (other.shape, other.labels, other.meta)
