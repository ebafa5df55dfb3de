"""What a pass takes beside the weights: key-value cache, activations and logits, by the numbers of a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MIN_ROWS = 16
"""Tokens of a prompt that are computed together however little memory there is."""
_FLOAT_BYTES = 4  # norms, scores and router weights are computed in float32
_SLACK = 1.25  # blocks that an allocator holds in between
_STATELESS = ("linear", "conv", "mamba", "recurrent")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes per token, per token of context, and per pair of both."""

    cache_bytes: int  # keys and values of one token, in layers that keep every token
    window_bytes: int  # the same in layers that keep the last `window` tokens
    window: int
    row_bytes: int  # activations of one token in the layer that takes most
    key_bytes: int  # one token of context in one layer, with keys and values repeated for every head
    score_bytes: int  # one pair of a token and a token of context: its place in a mask, or scores of all heads
    logits_bytes: int  # of one position

    @classmethod
    def of(cls, model: Any, top_k: int) -> Footprint:
        """Estimate it from a model's config; never too little for attention of the usual kinds."""
        text = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        item = max(getattr(getattr(model, "dtype", None), "itemsize", 2), 2)
        heads, head = _heads(text)
        whole, windowed = _layer_counts(text)
        token = _token_cache_bytes(text, item)
        implementation = str(getattr(model.config, "_attn_implementation", None) or "eager")
        return cls(
            cache_bytes=whole * token,
            window_bytes=windowed * token,
            window=_number(text, "sliding_window", 0),
            row_bytes=int(_SLACK * _row_bytes(text, item, top_k)),
            key_bytes=0 if "flash" in implementation else 2 * heads * head * item,
            score_bytes=_score_bytes(implementation, heads, item),
            logits_bytes=3 * _FLOAT_BYTES * _number(text, "vocab_size", 1 << 15),
        )

    def cached_bytes(self, tokens: int) -> int:
        """The key-value cache of one sequence of so many tokens."""
        kept = min(tokens, self.window) if self.window else tokens
        return self.cache_bytes * tokens + self.window_bytes * kept

    def rows_within(self, bound_bytes: int, batch: int, context: int) -> int:
        """How many tokens of each sequence can be computed together if activations are to stay below a bound."""
        fixed = batch * (context * self.key_bytes + self.logits_bytes)
        each = batch * (self.row_bytes + context * self.score_bytes)
        return max((bound_bytes - fixed) // each, MIN_ROWS)

    def pass_bytes(self, batch: int, rows: int, context: int) -> int:
        """The activations of a pass over so many tokens of each sequence, with so many to attend to."""
        each = rows * (self.row_bytes + context * self.score_bytes)
        return batch * (each + context * self.key_bytes + self.logits_bytes)


def _row_bytes(text: Any, item: int, top_k: int) -> int:
    """What one token takes on its way through a layer: states, queries, a dense block, and a row per expert."""
    hidden = _number(text, "hidden_size", 4096)
    heads, head = _heads(text)
    inner = _number(text, "moe_intermediate_size", 0) * _number(text, "n_shared_experts", 1)
    inner = max(inner, _number(text, "intermediate_size", 0), _number(text, "shared_expert_intermediate_size", 0))
    states = hidden * (4 * item + 3 * _FLOAT_BYTES)
    attention = 2 * heads * head * (3 * item + 2 * _FLOAT_BYTES)
    experts = top_k * (2 * hidden * _FLOAT_BYTES + 64)
    router = 3 * _FLOAT_BYTES * max(_number(text, name, 0) for name in ("num_experts", "num_local_experts"))
    return states + max(attention, 3 * inner * item, experts + router)


def _token_cache_bytes(text: Any, item: int) -> int:
    """Keys and values of one token in one layer; latent attention is cached as its heads see it."""
    heads, head = _heads(text)
    keys = _number(text, "qk_nope_head_dim", 0) + _number(text, "qk_rope_head_dim", 0) or head
    values = _number(text, "v_head_dim", head)
    return _number(text, "num_key_value_heads", heads) * (keys + values) * item


def _score_bytes(implementation: str, heads: int, item: int) -> int:
    if "flash" in implementation:
        return 0
    mask = 1 + _FLOAT_BYTES
    return mask if implementation == "sdpa" else mask + heads * (2 * _FLOAT_BYTES + item)


def _layer_counts(text: Any) -> tuple[int, int]:
    """The layers that cache every token, and those that cache a window of them."""
    layers = _number(text, "num_hidden_layers", 32)
    kinds = getattr(text, "layer_types", None)
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        return layers, 0
    windowed = kinds.count("sliding_attention") if _number(text, "sliding_window", 0) else 0
    without = sum(any(word in kind for word in _STATELESS) for kind in kinds)
    return max(len(kinds) - windowed - without, 0), windowed


def _heads(text: Any) -> tuple[int, int]:
    heads = _number(text, "num_attention_heads", 32)
    return heads, _number(text, "head_dim", max(_number(text, "hidden_size", 4096) // heads, 1))


def _number(config: Any, name: str, otherwise: int) -> int:
    """A whole number of a config, or a default where it has none or a different one for every layer."""
    try:
        value = getattr(config, name, None)
    except Exception:  # some configs raise an error of their own kind for what varies by layer
        return otherwise
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else otherwise
