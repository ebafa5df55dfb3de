"""Families through hotset against stock: a fast subset here, all of them by `make families`."""

from __future__ import annotations

from pathlib import Path

import exactness
import pytest
import tiny_models as tiny
import torch
from quantised import load_dequantised, save_fp8, save_mxfp4

import hotset
from hotset.engine.arena import poison
from hotset.errors import ModelError

# One per way of storing, gating and calling experts.
QUICK = [
    "qwen3_moe", "mixtral", "granitemoe", "gpt_oss", "nemotron_h", "gemma4", "muse_spark", "zaya", "deepseek_v4",
    "qwen3_vl_moe/composite", "llama4", "switch_transformers",
]  # fmt: skip
MAY_DIFFER = {"deepseek_v4", "llama4"}  # gates and kernels that round by how many rows they are given


@pytest.mark.parametrize("memory", exactness.MEMORIES)
@pytest.mark.parametrize("name", [name for name in QUICK if name in tiny.families()])
def test_a_family_computes_what_stock_computes(name: str, memory: str, tmp_path: Path) -> None:
    tiny.save(name, tmp_path)
    verdict = exactness.judge(name, memory, tmp_path)
    assert verdict.passed, verdict
    assert verdict.bit_equal or name in MAY_DIFFER, verdict
    assert verdict.misses > 0


@pytest.mark.parametrize("save", [save_fp8, save_mxfp4])
@pytest.mark.parametrize("experts", ["auto", "dense"])
def test_quantised_experts_compute_what_stock_computes_of_dequantised_ones(experts: str, save, tmp_path: Path) -> None:
    save(tmp_path)
    stock = exactness.aligned(load_dequantised(tmp_path))
    with tiny.quiet():
        model = hotset.load(str(tmp_path), memory="50%", experts=experts)
    exactness.aligned(model)
    poison(model.hotset.engine.offload.arena)
    given = tiny.inputs("", stock)
    expected, found = tiny.logits(stock, given), tiny.logits(model, given)
    model.hotset.close()
    assert torch.equal(expected, found)
    assert any("are expanded" in note for note in model.hotset.notes) == (experts == "dense")


def test_a_dense_model_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    with tiny.quiet():
        LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path)
        with pytest.raises(ModelError, match="LlamaForCausalLM has no experts"):
            hotset.load(str(tmp_path), memory="50%")
