"""Which tensors of a GGUF file become which parameters: for each architecture what transformers' loader does by rules.

Its newer loader states rules for some architectures itself, and those are taken as they are. The older one has them in
code that decodes all tensors first; here is the same as rules, and for gpt-oss what is missing there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_DECODER = {
    r"^token_embd\.": "model.embed_tokens.",
    r"^output_norm\.": "model.norm.",
    r"^output\.": "lm_head.",
    r"^blk\.": "model.layers.",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.attn_q\.": ".self_attn.q_proj.",
    r"\.attn_k\.": ".self_attn.k_proj.",
    r"\.attn_v\.": ".self_attn.v_proj.",
    r"\.attn_output\.": ".self_attn.o_proj.",
    r"\.attn_q_norm\.": ".self_attn.q_norm.",
    r"\.attn_k_norm\.": ".self_attn.k_norm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
    r"\.ffn_gate_inp\.": ".mlp.gate.",
    r"\.ffn_gate\.": ".mlp.gate_proj.",
    r"\.ffn_up\.": ".mlp.up_proj.",
    r"\.ffn_down\.": ".mlp.down_proj.",
    r"\.ffn_down_exps\.weight": ".mlp.experts.down_proj",
    r"\.ffn_gate_up_exps\.weight": ".mlp.experts.gate_up_proj",
}
_SHARED = {
    r"\.ffn_gate_inp_shexp\.": ".mlp.shared_expert_gate.",
    r"\.ffn_gate_shexp\.": ".mlp.shared_expert.gate_proj.",
    r"\.ffn_up_shexp\.": ".mlp.shared_expert.up_proj.",
    r"\.ffn_down_shexp\.": ".mlp.shared_expert.down_proj.",
}
_CORRECTION = {r"\.exp_probs_b\.bias": ".mlp.e_score_correction_bias"}


def _rules(renamed: dict[str, str]) -> list[Any]:
    from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming

    gate_and_up = WeightConverter(
        source_patterns=[r"\.ffn_gate_exps\.weight", r"\.ffn_up_exps\.weight"],
        target_patterns=".mlp.experts.gate_up_proj",
        operations=[Concatenate(dim=1)],
    )
    return [*(WeightRenaming(pattern, name) for pattern, name in renamed.items()), gate_and_up]


def _gpt_oss() -> list[Any]:
    from transformers.core_model_loading import Transpose, WeightConverter, WeightRenaming

    from hotset.models.gguf_operations import Interleave

    kept = {pattern: name for pattern, name in _DECODER.items() if "_exps" not in pattern}
    renamed = kept | {
        r"\.ffn_gate_inp\.": ".mlp.router.",
        r"\.post_attention_norm\.": ".post_attention_layernorm.",
        r"\.attn_post_norm\.": ".post_attention_layernorm.",
        r"\.attn_sinks\.weight": ".self_attn.sinks",
        r"\.ffn_down_exps\.bias": ".mlp.experts.down_proj_bias",
    }
    pairs = [
        WeightConverter(
            source_patterns=[rf"\.ffn_gate_exps\.{leaf}", rf"\.ffn_up_exps\.{leaf}"],
            target_patterns=f".mlp.experts.gate_up_proj{ending}",
            operations=[Interleave()],
        )
        for leaf, ending in (("weight", ""), ("bias", "_bias"))
    ]
    down = WeightConverter(
        source_patterns=r"\.ffn_down_exps\.weight",
        target_patterns=".mlp.experts.down_proj",
        operations=[Transpose(1, 2)],
    )
    return [*(WeightRenaming(pattern, name) for pattern, name in renamed.items()), *pairs, down]


_OWN: dict[str, Callable[[], list[Any]]] = {
    "qwen2moe": lambda: _rules(_DECODER | _SHARED),
    "qwen3moe": lambda: _rules(_DECODER),
    "gpt-oss": _gpt_oss,
    "minimax-m2": lambda: _rules(_DECODER | _CORRECTION),
}


def architectures() -> list[str]:
    """The architectures with experts that can be mapped."""
    return sorted({*_OWN, *(name for name in _stated() if name.endswith("moe"))})


def rules_for(architecture: str, config: Any) -> list[Any]:
    """What transformers' loader is told of names: renamings, and conversions of what is not stored as it is used."""
    own = _OWN.get(architecture)
    return own() if own is not None else _stated()[architecture](config)


def _stated() -> dict[str, Any]:
    """The architectures that the newer loader of the installed transformers has."""
    from transformers.integrations import gguf

    found: dict[str, Any] = getattr(gguf, "GGUF_ARCHS", {})
    return found
