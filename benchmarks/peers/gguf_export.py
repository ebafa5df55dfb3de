"""Write a Qwen3-MoE checkpoint as GGUF for llama.cpp: the same bf16 weights, one tensor in memory at a time.

With `--experts Q4_0` or another type experts are quantised by llama.cpp's own function; the rest stays bf16.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from hotset.files import write_beside

from safetensors_bits import Checkpoint

LAYER = {  # names in GGUF and in transformers, without ".weight"
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}


def names(layers: int) -> dict[str, str]:
    """Every tensor's name in GGUF, and where its values are."""
    found = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for i in range(layers):
        found |= {f"blk.{i}.{new}.weight": f"model.layers.{i}.{old}.weight" for new, old in LAYER.items()}
    return found


def describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the model's shape."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def describe_tokens(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """Write the vocabulary, so that ids can be given and returned; texts are cut elsewhere."""
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = sorted(document["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["id"] for token in document["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for _, i in vocabulary]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in document["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def values(checkpoint: Checkpoint, name: str, experts: int) -> NDArray[Any]:
    """One tensor as GGUF wants it: experts stacked, matrices in bf16, norms and routers in fp32."""
    if "{}" in name:
        return np.stack([checkpoint.bits(name.format(i)) for i in range(experts)])
    bits = checkpoint.bits(name)
    if bits.ndim == 1 or name.endswith("mlp.gate.weight"):
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(bits)


def quantiser(kind: gguf.GGMLQuantizationType) -> Callable[[NDArray[np.uint16]], NDArray[np.uint8]]:
    """What llama.cpp makes of bf16 matrices [experts, rows, columns] in a type of its blocks."""
    from importlib.util import find_spec

    found = find_spec("xllamacpp")
    if found is None or found.origin is None:
        raise SystemExit("quantising experts needs xllamacpp: pip install hotset[bench]")
    (library,) = Path(found.origin).parent.glob("xllamacpp*.so")
    function = ctypes.CDLL(str(library)).ggml_quantize_chunk
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    function.argtypes, function.restype = (
        (ctypes.c_int, pointer, pointer, whole, whole, whole, pointer),
        ctypes.c_size_t,
    )
    weights, size_bytes = gguf.GGML_QUANT_SIZES[kind]

    def quantised(bits: NDArray[np.uint16]) -> NDArray[np.uint8]:
        *stacked, columns = bits.shape
        rows = int(np.prod(stacked))
        numbers = np.ascontiguousarray((bits.astype(np.uint32) << 16).view(np.float32))
        blocks = np.empty((*stacked, columns // weights * size_bytes), np.uint8)
        function(int(kind), numbers.ctypes.data, blocks.ctypes.data, 0, rows, columns, None)
        return blocks

    return quantised


def export(folder: Path, out: Path, experts_as: str = "BF16") -> None:
    """Write the file: first all names and shapes, then the values one by one."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    experts = config.get("num_local_experts") or config["num_experts"]
    checkpoint, tensors = Checkpoint(folder), names(config["num_hidden_layers"])
    with write_beside(out) as scratch:
        writer = gguf.GGUFWriter(scratch, "qwen3moe")
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
        describe(writer, config)
        describe_tokens(writer, folder, config)
        kind, plain = gguf.GGMLQuantizationType[experts_as], gguf.GGMLQuantizationType.BF16
        small = None if kind == plain else quantiser(kind)
        for new, old in tensors.items():
            array = values(checkpoint, old, experts)
            raw = plain if array.dtype == np.uint16 else None
            if small is not None and "{}" in old:
                weights, size_bytes = gguf.GGML_QUANT_SIZES[kind]
                shape = (*array.shape[:-1], array.shape[-1] // weights * size_bytes)
                writer.add_tensor_info(new, shape, np.dtype(np.uint8), int(np.prod(shape)), kind)
            else:
                writer.add_tensor_info(new, array.shape, array.dtype, array.nbytes, raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for old in tensors.values():
            array = values(checkpoint, old, experts)
            writer.write_tensor_data(array if small is None or "{}" not in old else small(array))
        writer.close()


def main() -> None:
    """Parse and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="the GGUF file to write")
    parser.add_argument("--experts", default="BF16", help="the type of the experts' blocks: Q4_0, Q4_K, Q8_0 ...")
    options = parser.parse_args()
    export(options.model, options.out, options.experts)


if __name__ == "__main__":
    main()
