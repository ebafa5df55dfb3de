"""Models by their numbers alone: the words of `--shape`, and published models by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hotset.analysis.planner.model import BFLOAT16, MORE_SPECS, SPECS, UNNAMED, PlannedModel
from hotset.checks import whole
from hotset.errors import HotsetError
from hotset.models.footprint import Footprint

LIBRARIES_BYTES = 160 << 20
"""What libraries and the experts' own work take: `models/account.py` counts 128 and 32 MiB."""
CHUNK_TOKENS = 2048
"""Tokens of a prompt that are computed together, where memory is not short."""
_ITEM_BYTES = 2

PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "layers": 48, "experts": 128, "top_k": 8, "hidden": 2048, "intermediate": 768, "heads": 32, "kv_heads": 4,
        "head_dim": 128, "vocab": 151936,
    },
    "qwen3-235b-a22b": {
        "layers": 94, "experts": 128, "top_k": 8, "hidden": 4096, "intermediate": 1536, "heads": 64, "kv_heads": 4,
        "head_dim": 128, "vocab": 151936,
    },
    "gpt-oss-20b": {
        "layers": 24, "experts": 32, "top_k": 4, "hidden": 2880, "intermediate": 2880, "heads": 64, "kv_heads": 8,
        "head_dim": 64, "vocab": 201088, "own": "mxfp4",
    },
    "gpt-oss-120b": {
        "layers": 36, "experts": 128, "top_k": 4, "hidden": 2880, "intermediate": 2880, "heads": 64, "kv_heads": 8,
        "head_dim": 64, "vocab": 201088, "own": "mxfp4",
    },
    "mixtral-8x7b": {
        "layers": 32, "experts": 8, "top_k": 2, "hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8,
        "head_dim": 128, "vocab": 32000,
    },
    "olmoe-1b-7b": {
        "layers": 16, "experts": 64, "top_k": 8, "hidden": 2048, "intermediate": 1024, "heads": 16, "kv_heads": 16,
        "head_dim": 128, "vocab": 50304,
    },
}  # fmt: skip
"""Published models, by the numbers of their configs."""

_NEEDED = ("layers", "experts", "top_k", "hidden", "intermediate")
_MOST = {"layers": 4096, "experts": 32767, "top_k": 32767, "vocab": 1 << 24}
_OTHERS = 1 << 20


def parse_shape(text: str, context: int) -> PlannedModel:
    """A model of words such as "layers=48,experts=128,top_k=8,hidden=2048,intermediate=768", or a published one."""
    word = text.strip().lower()
    if word in PRESETS:
        return from_numbers(word, PRESETS[word], context)
    numbers = dict(_pair(part) for part in word.split(",") if part.strip())
    missing = [name for name in _NEEDED if name not in numbers]
    if missing:
        known = ", ".join(PRESETS)
        raise HotsetError(f"--shape lacks {', '.join(missing)}: write layers=48,experts=128,... or one of {known}")
    return from_numbers(UNNAMED, numbers, context)


def _pair(part: str) -> tuple[str, Any]:
    name, equals, value = (piece.strip() for piece in part.partition("="))
    known = (*_NEEDED, "heads", "kv_heads", "head_dim", "vocab", "dense_layers", "dense_intermediate", "shared", "own")
    if not equals or name not in known:
        raise HotsetError(f'--shape has no "{name:.40}": it has {", ".join(known)}, as in layers=48')
    if name == "own":
        if value not in {**SPECS, **MORE_SPECS}:
            raise HotsetError(f'--shape: own is one of {", ".join({**SPECS, **MORE_SPECS})}, not "{value:.40}"')
        return name, value
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise HotsetError(f'--shape: {name} is a whole number, not "{value:.40}"')
    return name, whole(int(value), f"{name} of --shape", 0 if "dense" in name or name == "shared" else 1,
                       _MOST.get(name, _OTHERS))  # fmt: skip


def from_numbers(name: str, numbers: dict[str, Any], context: int) -> PlannedModel:
    """The model that these numbers describe: attention with grouped heads, gated experts, bfloat16 beside them."""
    layers, hidden, inner = numbers["layers"], numbers["hidden"], numbers["intermediate"]
    heads = numbers.get("heads", max(hidden // 128, 1))
    head = numbers.get("head_dim", max(hidden // heads, 1))
    kv_heads, vocab = numbers.get("kv_heads", heads), numbers.get("vocab", 1 << 15)
    dense_layers, dense_inner = numbers.get("dense_layers", 0), numbers.get("dense_intermediate", 4 * hidden)
    all_layers = layers + dense_layers
    attention = 2 * hidden * head * (heads + kv_heads)
    router = layers * hidden * numbers["experts"]
    shared = layers * numbers.get("shared", 0) * 3 * hidden * inner + dense_layers * 3 * hidden * dense_inner
    read = _ITEM_BYTES * (all_layers * attention + router + shared + vocab * hidden)
    config = SimpleNamespace(
        hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head, vocab_size=vocab,
        num_hidden_layers=all_layers, moe_intermediate_size=inner, num_experts=numbers["experts"],
        _attn_implementation="sdpa",
    )  # fmt: skip
    footprint = Footprint.of(SimpleNamespace(config=config), numbers["top_k"])
    return PlannedModel(
        name=name,
        layers=layers,
        experts=numbers["experts"],
        top_k=numbers["top_k"],
        matrices=((2 * inner, hidden), (hidden, inner)),
        all_layers=all_layers,
        dense_bytes=read + _ITEM_BYTES * vocab * hidden,
        read_bytes=read,
        context_bytes=footprint.cached_bytes(context),
        work_bytes=footprint.pass_bytes(1, min(CHUNK_TOKENS, context), context) + LIBRARIES_BYTES,
        own=numbers.get("own", BFLOAT16),
    )
