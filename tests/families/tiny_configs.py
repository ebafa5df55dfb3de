"""Tiny settings for every family: one value per field name, set wherever a config has that field."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

VOCAB, HIDDEN, EXPERTS, TOP_K, LAYERS = 128, 32, 8, 2, 3
ZERO_EXPERTS = 4  # of longcat_flash, which routes to these as well: they return their input
SPARSE = ["dense", "sparse", "sparse"]
HYBRID = ["linear_attention", "full_attention", "linear_attention"]

TINY: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "d_model": HIDDEN, "num_layers": LAYERS, "num_heads": 4, "d_kv": 8, "d_ff": 48,
    # experts
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K, "moe_topk": TOP_K, "moe_k": TOP_K, "top_k_experts": TOP_K,
    "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "router_jitter_noise": 0.0,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "mlp_layer_types": SPARSE, "decoder_sparse_step": 1,
    # shared experts
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": 24, "shared_intermediate_size": 24, "share_expert_dim": 24,
    # multi-head latent attention and its indexer
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "index_topk": 64, "index_head_dim": 16, "index_n_heads": 2,
    # linear attention
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_head_dim": 8, "linear_num_heads": 4,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16, "mamba_dt_rank": 4,
    # everything else
    "sliding_window": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
    "num_mtp_layers": 0, "num_nextn_predict_layers": 0,
}  # fmt: skip

# What a family needs beyond the values above.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": HYBRID},
    "dbrx": {
        "n_heads": 4,
        "n_layers": LAYERS,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": EXPERTS, "moe_top_k": TOP_K, "hidden_size": HIDDEN},
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "partial_rotary_factor": 0.5,
        "o_groups": 2,
        "o_lora_rank": 8,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "diffusion_gemma": {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "ernie4_5_vl_moe": {
        "head_dim": 16,
        "moe_intermediate_size": [24, 16],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [3, 3, 2]},
    },
    "flint": {"mlp_only_layers": [0]},
    "gemma4": {
        "enable_moe_block": True,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "glm4v_moe": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        },
    },
    "glm5_next": {
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "layer_types": HYBRID,
    },
    # Its gate is one flat tensor: at other widths stock's own bits depend on how many rows are computed together.
    "gpt_oss": {"intermediate_size": 64},
    "granitemoehybrid": {"layer_types": HYBRID},
    "hunyuan_v1_moe": {"num_experts": EXPERTS},
    "inkling": {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "rel_extent": 32, "d_rel": 8,
        "logits_mup_width_multiplier": 1.0,
    },
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "jetmoe": {"kv_channels": 8},
    "kimi_linear": {"layer_types": HYBRID},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {
        "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "head_dim": 8,
        "zero_expert_num": ZERO_EXPERTS,
    },
    "minimax_m3_vl": {"dense_intermediate_size": 48, "rotary_dim": 8},
    "muse_spark": {"moe_hidden_size": 24},
    "nemotron_h": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 24,
    },
    "nllb_moe": {
        "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_sparse_step": 1, "decoder_sparse_step": 1,
    },
    "qwen3_5_moe": {"layer_types": HYBRID},
    "qwen3_omni_moe/talker": {"shared_expert_intermediate_size": 24},
    "qwen3_next": {"layer_types": HYBRID},
    "qwen4_exp": {
        "layer_types": HYBRID, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 64, "indexer_compress_ratio": 4,
    },
    "switch_transformers": {
        "expert_capacity": 2,  # small enough that tokens are dropped
        "num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip

# A vision tower only has to be there, so that the checkpoint is laid out as that of the whole model.
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "depth": 1, "num_heads": 2, "image_size": 28,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 14, "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
VISION_OVERRIDES: dict[str, dict[str, Any]] = {}


def fields_of(config_class: type) -> set[str]:
    """The names a config class takes."""
    if dataclasses.is_dataclass(config_class):
        return {field.name for field in dataclasses.fields(config_class) if field.init}
    return set(inspect.signature(config_class).parameters)


def tiny_values(config_class: type, overrides: dict[str, Any]) -> dict[str, Any]:
    """The tiny values for the fields this config class has."""
    known = fields_of(config_class)
    values = {field: value for field, value in TINY.items() if field in known}
    if "kv_lora_rank" in known:
        values["num_key_value_heads"] = values["num_attention_heads"]  # latent attention gives each head its own keys
    return values | overrides


def vision_values(config_class: type, overrides: dict[str, Any]) -> dict[str, Any]:
    """The tiny values of a vision tower, which no test looks into."""
    known = fields_of(config_class)
    return {field: value for field, value in VISION.items() if field in known} | overrides


def tiny_config(name: str, config_class: type, **changes: Any) -> Any:
    """The tiny config of one family; the parts of a composite get the values of the tower they are."""
    family = name if name in OVERRIDES else name.partition("/")[0]
    blank = config_class()
    if not hasattr(blank, "text_config"):
        return config_class(**tiny_values(config_class, OVERRIDES.get(family, {}) | changes))
    towers = {key: type(getattr(blank, key)) for key in blank.sub_configs if getattr(blank, key, None) is not None}
    parts = {}
    for key, tower in towers.items():
        extra = OVERRIDES.get(family, {}) | changes if key == "text_config" else VISION_OVERRIDES.get(family, {})
        small = tiny_values if key == "text_config" else vision_values
        parts[key] = {"model_type": tower.model_type} | small(tower, extra)
    tokens = [f for f in fields_of(config_class) if f.endswith(("token_id", "token_index"))]
    return config_class(**parts, **{f: VOCAB - 1 - i for i, f in enumerate(sorted(tokens))})
