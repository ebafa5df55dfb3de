"""Small GGUF files, written by the `gguf` package from a checkpoint's folder as llama.cpp's converter would."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from random_blocks import random_blocks
from safetensors.torch import load_file

Choose = Callable[[str], str]
"""The type of a tensor by its GGUF name."""

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate.": "ffn_gate_inp.",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
}  # fmt: skip
_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_PLACES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_PLAIN = {"F32", "F16", "BF16"}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors by their GGUF names, the experts of a layer in one."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if match := _EXPERT.fullmatch(name):
            key = f"blk.{match[1]}.ffn_{_PLACES[match[3]]}_exps.weight"
            experts.setdefault(key, {})[int(match[2])] = tensor
            continue
        name = name.replace("block_sparse_moe", "mlp")
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        found[name] = tensor.squeeze(0) if "inp_shexp" in name else tensor
    return found | {key: torch.stack([each[i] for i in range(len(each))]) for key, each in experts.items()}


def quantised(tensor: torch.Tensor, kind: str, seed: int = 0) -> np.ndarray:
    """The blocks of a tensor: by the package where it can make them, else at random with tame scales."""
    numbers = tensor.float().numpy()
    try:
        return gguf.quantize(numbers, Type[kind])
    except NotImplementedError:
        return random_blocks(kind, numbers.shape, seed)


def keys_of(folder: Path, architecture: str) -> dict[str, object]:
    """The keys that llama.cpp's converter writes for a config."""
    config = json.loads((folder / "config.json").read_text())
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    keys: dict[str, object] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "expert_count": config.get("num_experts", config.get("num_local_experts")),
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": width,
    }
    if config.get("head_dim"):
        keys |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if config.get("rotary_dim"):
        keys["rope.dimension_count"] = config["rotary_dim"]
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def write(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    keys: Mapping[str, object],
    choose: Choose,
    *,
    architecture: str = "qwen3moe",
    tokenizer: Path | None = None,
    shards: int = 1,
) -> Path:
    """Write a file, or shards of about the same number of tensors; returns the first."""
    per_shard = -(-len(tensors) // shards) if shards > 1 else 0
    writer = gguf.GGUFWriter(str(path), architecture, split_max_tensors=per_shard)
    for key, value in keys.items():
        _add(writer, key, value)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    for number, (name, tensor) in enumerate(tensors.items()):
        kind = choose(name)
        if kind == "F32":
            writer.add_tensor(name, tensor.float().numpy())
        elif kind == "F16":
            writer.add_tensor(name, tensor.to(torch.float16).numpy())
        elif kind == "BF16":
            raw = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, raw, raw_dtype=Type.BF16)
        else:
            writer.add_tensor(name, quantised(tensor, kind, number), raw_dtype=Type[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if shards == 1 else sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0]


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, str(value))


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """A byte-level tokenizer."""
    found = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = found["model"]["vocab"] | {each["content"]: each["id"] for each in found["added_tokens"]}
    special = {each["id"] for each in found["added_tokens"] if each["special"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in found["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)


def matrices_as(kind: str, others: str = "Q8_0", down: str | None = None) -> Choose:
    """Experts in a type, their last matrix perhaps in another; the other matrices, and vectors and routers plain."""

    def choose(name: str) -> str:
        if "_exps" in name:
            return (down or kind) if "down" in name else kind
        return "F32" if "norm" in name or "gate_inp" in name or name.endswith("bias") else others

    return choose


def from_folder(
    folder: Path, path: Path, choose: Choose, *, architecture: str = "qwen3moe", shards: int = 1, **more: object
) -> Path:
    """The GGUF file of a checkpoint's folder."""
    keys = keys_of(folder, architecture) | {f"{architecture}.{key}": value for key, value in more.items()}
    return write(
        path, tensors_of(folder), keys, choose, architecture=architecture, tokenizer=folder, shards=shards
    )  # fmt: skip
