"""The config of a GGUF model, as transformers makes it of the file's keys, with what it leaves out put right.

transformers knows nothing of shards, and not of the experts' own width, which it takes from the family's defaults:
sizes come from the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from hotset.errors import HotsetError, ModelError
from hotset.models.patches import gguf_read_by
from hotset.models.plausible import refuse_no_numbers, refuse_sizes
from hotset.store.gguf import PLAIN, GgufHeader, read_list
from hotset.text import one_line

_TOKENS = "tokenizer.ggml.tokens"
_WINDOW = "sliding_window"


class Fields:
    """A header as the reader of the `gguf` package has it, as far as transformers asks.

    That reader makes several objects of every token, and knows of one shard only.
    """

    def __init__(self, header: GgufHeader, *, lists: bool) -> None:
        self.tensors = [SimpleNamespace(name=name) for name in header.tensors]
        self.fields = {
            key: Field.of(value)
            for key, value in header.keys.items()
            if key not in header.lists and ".rope.scaling." not in key  # which `_rotations` reads
        }
        if lists:
            self.fields |= {key: Field.of(read_list(header.files[0], place)) for key, place in header.lists.items()}
        elif _TOKENS in header.lists:
            count = Field.of(header.lists[_TOKENS].elements)
            self.fields.setdefault(f"{header.architecture}.vocab_size", count)


@dataclass(frozen=True)
class Field:
    """One key: its values, and their types by the numbers that GGUF has for them."""

    parts: list[Any]
    types: list[int]

    @property
    def data(self) -> range:
        """Which of the parts are values."""
        return range(len(self.parts))

    @classmethod
    def of(cls, value: Any) -> Field:
        """A value, or a list of them."""
        values = value if isinstance(value, list) else [value]
        kind = {bool: 7, int: 11, float: 12, str: 8}[type(values[0])] if values else 4
        parts = [np.frombuffer(v.encode(), np.uint8) if kind == 8 else [v] for v in values]
        return cls(parts, [9, kind] if isinstance(value, list) else [kind])


def read_config(header: GgufHeader) -> Any:
    """The config of a model by its header."""
    from transformers import AutoConfig

    first = header.files[0]
    _refuse_layers(header)
    _refuse_top_k(header)
    refuse_no_numbers(str(first), {key: v for key, v in header.keys.items() if not key.startswith("tokenizer.")})
    try:
        with gguf_read_by(lambda _: Fields(header, lists=False)):
            config = AutoConfig.from_pretrained(str(first.parent), gguf_file=first.name)
        for name, value in _corrections(header, config):
            setattr(config, name, value)
        numbers = config.to_dict()
    except HotsetError:
        raise
    except Exception as error:  # whatever a library makes of strange keys
        raise ModelError(f"the keys of {first} make no config ({one_line(error)}): download it again") from error
    refuse_sizes(str(first), numbers, [tensor.shape for tensor in header.tensors.values()])
    return config


def read_tokenizer(header: GgufHeader) -> Any:
    """The tokenizer of a model by its header."""
    from transformers import AutoTokenizer

    first = header.files[0]
    with gguf_read_by(lambda _: Fields(header, lists=True)):
        return AutoTokenizer.from_pretrained(str(first.parent), gguf_file=first.name)


def _refuse_layers(header: GgufHeader) -> None:
    """Refuse more layers than there are tensors, before a config lists them one by one."""
    layers = header.keys.get(f"{header.architecture}.block_count")
    if type(layers) is not int or not 0 < layers <= len(header.tensors):
        raise ModelError(
            f"{header.files[0]} says that its model has {layers!r:.40} layers, and it has {len(header.tensors):,} "
            "tensors: download it again"
        )


def _refuse_top_k(header: GgufHeader) -> None:
    """Refuse a number of experts per token that the model does not have, by the name of the key."""
    used, experts = (header.keys.get(f"{header.architecture}.expert_{word}") for word in ("used_count", "count"))
    if type(used) is int and type(experts) is int and not 0 < used <= experts:
        raise ModelError(
            f"{header.files[0]} says {header.architecture}.expert_used_count = {used:,}, and a layer has {experts:,} "
            f"experts: it must be 1 to {experts:,}; download it again"
        )


def _corrections(header: GgufHeader, config: Any) -> Iterator[tuple[str, Any]]:
    """What the config says otherwise, or not at all."""
    from hotset.formats import element_type

    yield "dtype", element_type(_dtype(header))
    yield "tie_word_embeddings", "output.weight" not in header.tensors
    if (embedding := header.tensors.get("token_embd.weight")) is not None:
        yield "vocab_size", embedding.shape[0]
    if (head := header.keys.get(f"{header.architecture}.attention.key_length")) is not None:
        yield "head_dim", head
    if (window := header.keys.get(f"{header.architecture}.attention.sliding_window")) and hasattr(config, _WINDOW):
        yield _WINDOW, window
    experts = _rows(header, "ffn_down_exps.weight", -1)
    if experts is not None:
        yield "moe_intermediate_size" if hasattr(config, "moe_intermediate_size") else "intermediate_size", experts
    shared = _rows(header, "ffn_down_shexp.weight", -1)
    if shared is not None and hasattr(config, "shared_expert_intermediate_size"):
        yield "shared_expert_intermediate_size", shared
    if hasattr(config, "mlp_only_layers"):
        yield "mlp_only_layers", [int(n) for n in _layers(header, "ffn_gate.weight")]
    yield from _rotations(header, config)


def _rotations(header: GgufHeader, config: Any) -> Iterator[tuple[str, Any]]:
    """How positions beyond the context of training are rotated, which transformers does not read."""
    prefix = f"{header.architecture}.rope.scaling."
    kind = header.keys.get(f"{prefix}type")
    if kind in (None, "none"):
        return
    if kind not in ("yarn", "linear"):
        raise ModelError(f"{header.files[0]} scales rotations by {kind!r:.40}, which hotset does not map")
    scaled = dict(getattr(config, "rope_parameters", None) or {}) | {"rope_type": kind}
    names = {
        "factor": "factor", "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
    }  # fmt: skip
    scaled |= {name: header.keys[prefix + key] for key, name in names.items() if prefix + key in header.keys}
    yield "rope_parameters", scaled


def _dtype(header: GgufHeader) -> str:
    """The type to compute in where none is asked for: that of plain matrices, or bfloat16 where there are blocks."""
    kinds = {tensor.type.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    for name in ("BF16", "F16"):
        if name in kinds and kinds <= set(PLAIN):
            return PLAIN[name]
    return "float32" if kinds <= {"F32"} else "bfloat16"


def _rows(header: GgufHeader, name: str, dimension: int) -> int | None:
    """The size of a tensor that some layer has."""
    found = next((tensor for key, tensor in header.tensors.items() if key.endswith(name)), None)
    return None if found is None else found.shape[dimension]


def _layers(header: GgufHeader, name: str) -> list[str]:
    """The numbers of the layers that have a tensor, in order."""
    found = [key.split(".")[1] for key in header.tensors if key.startswith("blk.") and key.endswith(f".{name}")]
    return sorted((each for each in found if each.isdecimal()), key=int)
