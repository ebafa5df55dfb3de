"""The small parts of a step as one kernel each: norms, rotations and routers, and attention for one new token."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from hotset.runtime.graph.attention import using_decode_attention

MOST_SHAPES = 64
"""Of one small module, by batch, width and type: beyond torch's own limit of eight they would not be compiled."""
_SMALL = ("Norm", "RotaryEmbedding", "Router")


@contextmanager
def fused(model: Any, device: torch.device) -> Iterator[None]:
    """Norms, rotations and routers compiled into one kernel each while a step is captured; the model stays as it is."""
    if device.type != "cuda":
        yield
        return
    undo: list[Callable[[], Any]] = []
    compiled = {
        kind: torch.compile(kind.forward, dynamic=False)
        for kind in {type(module) for module in model.modules()}
        if any(part in kind.__name__ for part in _SMALL)
    }
    try:  # an interrupt may come between any two of these: how to undo each is noted before it is done
        for module in model.modules():
            if type(module) in compiled and "forward" not in module.__dict__:
                undo.append(partial(module.__dict__.pop, "forward", None))
                module.forward = types.MethodType(compiled[type(module)], module)
        home: Any = sys.modules[type(model).__module__]
        if rotate := getattr(home, "apply_rotary_pos_emb", None):
            undo.append(lambda: setattr(home, "apply_rotary_pos_emb", rotate))
            home.apply_rotary_pos_emb = torch.compile(rotate, dynamic=False)
        config: Any = torch._dynamo.config
        with using_decode_attention(model), config.patch(recompile_limit=MOST_SHAPES):
            yield
    finally:
        for back in undo:
            back()
