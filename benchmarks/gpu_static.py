"""Decoding in a static cache, with routing and predictions forced by numbers on the device: a graph can follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hotset.models.routers import Routers
from hotset.models.static_caches import static_cache
from hotset.trace import Trace

CONTEXT = 512


class DeviceRouting:
    """Makes every router choose the experts of a trace, token after token."""

    def __init__(self, model: Any, trace: Trace) -> None:
        self.plan = torch.from_numpy(trace.experts.astype(np.int64)).cuda()
        self.at = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.token = 0
        routers = [m for name, m in model.named_modules() if name.endswith((".mlp.gate", ".mlp.router"))]
        self.handles = [router.register_forward_hook(self._force(layer)) for layer, router in enumerate(routers)]

    def _force(self, layer: int) -> Any:
        def hook(_: Any, __: Any, outputs: Any) -> Any:
            logits, weights, _index = outputs
            return logits, weights, self.plan[:, layer].index_select(0, self.at)

        return hook

    def next(self) -> None:
        """Go on to the next token of the trace."""
        self.token = (self.token + 1) % len(self.plan)
        self.at.fill_(self.token)

    def remove(self) -> None:
        """Let the routers decide again."""
        for handle in self.handles:
            handle.remove()


class ForcedPredictions:
    """What the next routers predict where routing is forced: right so often, else what the layer used shortly after.

    The routers themselves are asked, too, since that takes time; only their answer is replaced.
    """

    def __init__(
        self, routers: Routers, trace: Trace, routing: DeviceRouting, right: Sequence[float], seed: int = 0
    ) -> None:
        self.routers, self.routing = routers, routing
        scores = _scores(trace.experts.astype(np.int64), trace.shape.experts, right, np.random.default_rng(seed))
        self.scores = torch.from_numpy(scores).to(torch.bfloat16).cuda()

    def __call__(self, layer: int, hidden: torch.Tensor, targets: int) -> list[torch.Tensor]:
        """Scores of the next layers' experts, the nearest layer first."""
        self.routers.scores(layer, hidden, targets)
        return [self.scores[:, layer, distance].index_select(0, self.routing.at) for distance in range(targets)]


def _scores(experts: Any, count: int, right: Sequence[float], rng: np.random.Generator) -> Any:
    """[tokens, layers, distances, experts]: the first of those named has the highest."""
    tokens, layers, top_k = experts.shape
    scores = np.full((tokens, layers, len(right), count), -np.inf, np.float32)
    every = np.arange(tokens)
    for distance, share in enumerate(right):
        for layer in range(layers - 1 - distance):
            true = experts[:, layer + 1 + distance]
            other = true[(every + rng.integers(1, 20, tokens)) % tokens]
            named = np.where(rng.random(true.shape) < share, true, other)
            for place in reversed(range(top_k)):
                scores[every, layer, distance, named[:, place]] = top_k - place
    return scores


class StaticDecoder:
    """One sequence in a static cache, token by token, with masks as generate() makes them."""

    def __init__(self, model: Any, trace: Trace, forward: Callable[..., Any] | None = None) -> None:
        self.model, self.forward = model, forward or model
        self.cache = static_cache(model.config, CONTEXT)
        with torch.no_grad():
            prompt = torch.tensor([[17, 5, 9, 3]], device="cuda")
            model(input_ids=prompt, past_key_values=self.cache, use_cache=True)
        self.position = torch.full((1, 1), 4, device="cuda")
        self.ids = torch.tensor([[17]], device="cuda")
        self.keys = torch.arange(CONTEXT, device="cuda")
        self.routing = DeviceRouting(model, trace)

    def mask(self) -> Any:
        """What the new token may look at; a window, where the model has one, apart."""
        full = (self.keys <= self.position)[:, None, None]
        window = getattr(self.model.config, "sliding_window", None)
        if self.model.config._attn_implementation == "sdpa" or window is None:
            return full
        near = full & (self.keys > self.position - window)[:, None, None]
        lowest = torch.finfo(torch.bfloat16).min
        empty = torch.zeros(full.shape, device="cuda", dtype=torch.bfloat16)
        return {
            "full_attention": empty.masked_fill(~full, lowest),
            "sliding_attention": empty.masked_fill(~near, lowest),
        }

    @torch.no_grad()
    def step(self, tokens: int) -> None:
        """Decode so many tokens."""
        for _ in range(tokens):
            self.routing.next()
            out = self.forward(
                input_ids=self.ids, past_key_values=self.cache, position_ids=self.position,
                attention_mask=self.mask(), use_cache=True, logits_to_keep=1,
            )  # fmt: skip
            self.ids = out.logits[:, -1:].argmax(-1)
            self.position += 1

    def ms(self, tokens: int) -> float:
        """Milliseconds per token."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.step(tokens)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began) / tokens

    def close(self) -> None:
        """Let the routers decide again."""
        self.routing.remove()
