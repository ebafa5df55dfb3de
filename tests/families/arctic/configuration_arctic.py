"""The config of Snowflake Arctic, as its repository has it, as far as the architecture depends on it."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class ArcticConfig(PretrainedConfig):
    model_type = "arctic"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 64,
        intermediate_size: int = 32,
        num_hidden_layers: int = 4,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 2,
        hidden_act: str = "silu",
        max_position_embeddings: int = 512,
        rms_norm_eps: float = 1e-5,
        initializer_range: float = 0.2,
        num_local_experts: int = 8,
        num_experts_per_tok: int = 2,
        moe_layer_frequency: int = 2,
        parallel_attn_mlp_res: bool = True,
        **more: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.num_local_experts = num_local_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.moe_layer_frequency = moe_layer_frequency
        self.parallel_attn_mlp_res = parallel_attn_mlp_res
        self.use_cache = True
        super().__init__(**({"tie_word_embeddings": False} | more))
