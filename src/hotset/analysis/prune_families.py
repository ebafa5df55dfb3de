"""What is known of families that can be pruned: how their config counts experts, and what a smaller router changes."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from hotset.analysis.prune_choice import RouterRules
from hotset.errors import ModelError
from hotset.models.layers import MoeLayer

EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""What configs call the number of experts of a layer; files of earlier versions may have another of them."""
FAMILIES: tuple[str, ...] = (
    "afmoe", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss",
    "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4", "jamba",
    "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "mixtral",
    "nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "solar_open",
)  # fmt: skip
"""Families of which a tiny model was pruned of experts that its text did not use, and spoke as before or as noted."""

METHODS = ("fp8", "mxfp4")
"""Quantised checkpoints that are cut, their scales with their weights."""
ALWAYS_GROW = ("deepseek_v2", "jamba")
"""Families whose router takes a softmax over all experts and never divides by the sum of those chosen."""
MAY_GROW = ("mellum", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next")
"""Families that do not divide by it where norm_topk_prob is false."""
BIASED_SHARES = ("ernie4_5_moe",)
"""Families that add a correction to shares of all experts, which grow where there are fewer experts."""


def check_family(model: Any, config: dict[str, Any]) -> None:
    """Refuse a model that is not known to work with fewer experts."""
    family = str(model.config.model_type)
    quantised = config.get("quantization_config")
    if quantised is not None and not _can_be_cut(quantised):
        raise ModelError(
            f"this checkpoint is quantised in a way that hotset prune does not cut ({', '.join(METHODS)} are): prune "
            "the original weights, and make the result small with hotset pack --experts int4"
        )
    if not type(model).__module__.startswith("transformers."):
        raise ModelError("this model runs code of its own, whose routers hotset does not know: it cannot be pruned")
    if family not in FAMILIES or config.get("model_type") != family:
        raise ModelError(
            f"hotset prune does not know the routers of {config.get('model_type')!s:.40}: it prunes "
            f"{', '.join(FAMILIES)}"
        )


def _can_be_cut(quantised: Any) -> bool:
    """Whether scales lie beside the weights of each expert, and no setting names an expert by its number."""
    known = isinstance(quantised, dict) and quantised.get("quant_method") in METHODS
    return known and re.search(r"experts\W+\d", json.dumps(quantised)) is None


def rules_of(model: Any, moe_layer: MoeLayer) -> RouterRules:
    """What the routers of a model ask of their experts."""
    config = model.config.get_text_config()
    groups = max(int(getattr(config, "n_group", None) or 1), 1)
    top_groups = int(getattr(config, "topk_group", None) or groups)
    return RouterRules(moe_layer.experts, moe_layer.top_k, groups, top_groups)


def smaller_config(config: dict[str, Any], model: Any, experts: int, keep: int) -> dict[str, Any]:
    """The config of a checkpoint with another number of experts in each layer."""
    found = copy.deepcopy(config)
    section = found["text_config"] if isinstance(found.get("text_config"), dict) else found
    keys = [key for key in EXPERT_KEYS if section.get(key) == experts]
    stated = model.config.get_text_config()
    for key in keys or [key for key in EXPERT_KEYS if getattr(stated, key, None) == experts][:1]:
        section[key] = keep
    return found


def notes_of(model: Any) -> list[str]:
    """What a person should know of the router of this family."""
    family, config = str(model.config.model_type), model.config.get_text_config()
    if family in ALWAYS_GROW or (family in MAY_GROW and not getattr(config, "norm_topk_prob", False)):
        return [
            "the router's weights are shares among all experts: with fewer of them all grow, so that outputs differ "
            "even where only unused experts are gone"
        ]
    if family in BIASED_SHARES:
        return ["the router adds a correction to shares among all experts: with fewer of them some choices shift"]
    return []
