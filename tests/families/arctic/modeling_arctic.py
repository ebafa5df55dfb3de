"""Snowflake Arctic by its published architecture: a dense MLP on the residual, beside a layer of experts.

The experts are a plain list of modules that a loop calls one by one, and the layer of experts takes what the attention
took, not what it gave.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from .configuration_arctic import ArcticConfig

Tensor = torch.Tensor


class ArcticRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden.dtype)


class ArcticAttention(nn.Module):
    def __init__(self, config: ArcticConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.size = layer, config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        inner, keys = config.num_attention_heads * self.size, config.num_key_value_heads * self.size
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        batch, length, _ = hidden.shape
        query, key, value = (
            project(hidden).view(batch, length, -1, self.size).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (rotated(each, positions) for each in (query, key))
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        key, value = (each.repeat_interleave(self.groups, dim=1) for each in (key, value))
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def rotated(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions."""
    size = heads.shape[-1]
    rates = 10_000.0 ** (-torch.arange(0, size, 2, device=heads.device).float() / size)
    angles = torch.cat([positions[..., None].float() * rates] * 2, dim=-1)[:, None]
    first, second = heads.chunk(2, dim=-1)
    return (heads * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()).to(heads.dtype)


class ArcticMLP(nn.Module):
    def __init__(self, config: ArcticConfig, is_residual_mlp: bool = False) -> None:
        super().__init__()
        self.hidden_dim = config.hidden_size
        self.ffn_dim = self.hidden_dim if is_residual_mlp else config.intermediate_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.w2(self.act_fn(self.w1(hidden_states)) * self.w3(hidden_states))


class ArcticMoE(nn.Module):
    def __init__(self, config: ArcticConfig, layer: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.num_local_experts, config.num_experts_per_tok
        self.is_moe_layer = (layer + 1) % config.moe_layer_frequency == 0
        if self.is_moe_layer:
            self.gate = nn.Linear(config.hidden_size, self.num_experts, bias=False)
            self.experts = nn.ModuleList([ArcticMLP(config) for _ in range(self.num_experts)])
        else:
            self.mlp = ArcticMLP(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not self.is_moe_layer:
            return self.mlp(hidden_states)
        hidden = hidden_states.view(-1, hidden_states.shape[-1])
        weights = functional.softmax(self.gate(hidden), dim=1, dtype=torch.float)
        weights, chosen = torch.topk(weights, self.top_k, dim=-1)
        if self.top_k > 1:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(hidden.dtype)
        out = torch.zeros_like(hidden)
        mask = functional.one_hot(chosen, num_classes=self.num_experts).permute(2, 1, 0)
        for number in range(self.num_experts):
            place, tokens = torch.where(mask[number])
            if len(tokens):
                result = self.experts[number](hidden[tokens]) * weights[tokens, place, None]
                out.index_add_(0, tokens, result.to(hidden.dtype))
        return out.view(hidden_states.shape)


class ArcticDecoderLayer(nn.Module):
    def __init__(self, config: ArcticConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = ArcticAttention(config, layer)
        self.block_sparse_moe = ArcticMoE(config, layer)
        self.input_layernorm = ArcticRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = ArcticRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.parallel = config.parallel_attn_mlp_res and self.block_sparse_moe.is_moe_layer
        if self.parallel:
            self.residual_layernorm = ArcticRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.residual_mlp = ArcticMLP(config, is_residual_mlp=True)

    def forward(self, hidden: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        attended = hidden + self.self_attn(self.input_layernorm(hidden), mask, positions, cache)
        if not self.parallel:
            return attended + self.block_sparse_moe(self.post_attention_layernorm(attended))
        dense = attended + self.residual_mlp(self.residual_layernorm(attended))
        return dense + self.block_sparse_moe(self.post_attention_layernorm(hidden))


class ArcticPreTrainedModel(PreTrainedModel):
    config_class = ArcticConfig
    base_model_prefix = "model"
    _no_split_modules = ("ArcticDecoderLayer",)
    _supports_sdpa = True


class ArcticModel(ArcticPreTrainedModel):
    def __init__(self, config: ArcticConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([ArcticDecoderLayer(config, n) for n in range(config.num_hidden_layers)])
        self.norm = ArcticRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(self, input_ids: Tensor, cache: Any) -> Tensor:
        length, past = input_ids.shape[1], 0 if cache is None else cache.get_seq_length()
        positions = torch.arange(past, past + length, device=input_ids.device)[None]
        mask = torch.ones(length, past + length, dtype=torch.bool, device=input_ids.device).tril(past)
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, mask, positions, cache)
        return self.norm(hidden)


class ArcticForCausalLM(ArcticPreTrainedModel, GenerationMixin):
    def __init__(self, config: ArcticConfig) -> None:
        super().__init__(config)
        self.model = ArcticModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,  # noqa: ARG002 - sequences are not padded here
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> MoeCausalLMOutputWithPast:
        cache = past_key_values
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        hidden = self.model(input_ids, cache)
        return MoeCausalLMOutputWithPast(logits=self.lm_head(hidden[:, -logits_to_keep:]), past_key_values=cache)
