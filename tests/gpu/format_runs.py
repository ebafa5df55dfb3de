"""What models in weight formats answer on a GPU, at several sizes and by either driver."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import encoded_models
import torch
from published import PUBLISHED

import hotset

TOKENS = 12
PROMPTS = {"short": 6, "long": 70}
"""Few tokens go through the kernels of decode steps, many through grouped products."""
SETTINGS = [
    ("100%", "off", "device"), ("30%", "auto", "device"), ("50%", "auto", "host"), ("30%", "off", "host"),
]  # fmt: skip
DENSE = ("50%", "off", "host")


def make_plain(folder: Path) -> Path:
    """A small checkpoint of plain numbers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=192, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=96,
        initializer_range=0.1, eos_token_id=None,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def make_for_blocks(folder: Path) -> Path:
    """A small checkpoint whose rows are whole blocks of 256, with a tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from hotset import reference

    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=8192, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=256,
        initializer_range=0.1, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    for file in Path(reference.path()).glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return folder


def encoded(plain: Path, target: Path, name: str) -> Path:
    """The same checkpoint in a published format."""
    kind = PUBLISHED[name]
    folder = encoded_models.rewrite(plain, target, kind.named)
    encoded_models.edit_config(folder, quantization_config=kind.config)
    return folder


def answer(model: Any, prompt: int) -> tuple[list[int], Any]:
    """The text that follows a prompt of so many tokens, and the logits of every step."""
    ids = (torch.arange(prompt, device="cuda") * 37 % 120 + 5).unsqueeze(0)
    seen: list[Any] = []

    def keep(_: Any, scores: Any) -> Any:
        seen.append(scores.clone())
        return scores

    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
        pad_token_id=0, logits_processor=[keep],
    )  # fmt: skip
    return found[0, prompt:].tolist(), torch.stack(seen)


def served(
    folder: Path, dtype: torch.dtype, setting: tuple[str, ...], matrices: int = 2, **more: Any
) -> dict[str, Any]:
    """What a model answers to all prompts at one size, by one driver, with so many matrices of an expert packed."""
    memory, prefetch, engine = setting
    experts = "auto" if matrices else "dense"
    given = {"memory": memory, "prefetch": prefetch, "engine": engine, "dtype": dtype, "device": "cuda"}
    model = hotset.load(folder, **given, experts=experts, **more)
    try:
        assert all(len(layer.layout.matrices) == matrices for layer in model.hotset.engine.offload.catalog.layers)
        if model.hotset.engine.device_decode is not None:
            assert model.hotset.engine.device_decode.filler.wait(60)
        found = {name: answer(model, prompt) for name, prompt in PROMPTS.items()}
        assert model.hotset.stats()["driven_by"] == engine
    finally:
        model.hotset.close()
    return found


def all_agree(folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """What each driver answers, the same bits at every size."""
    found: dict[str, Any] = {}
    for setting in SETTINGS:
        now = served(folder, dtype, setting)
        before = found.setdefault(setting[2], now)
        for name in PROMPTS:
            assert now[name][0] == before[name][0], (setting, name)
            assert torch.equal(now[name][1], before[name][1]), (setting, name)
    return found
