"""Every experts class of the installed transformers has a tiny model, and the tiny models are fit to test with."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models as tiny
import torch
from family_scan import OUT_OF_SCOPE, decorated_classes, own_code_classes
from quantised import agreement, fp8_original, load_dequantised, mxfp4_original, save_fp8, save_mxfp4

# One per way of storing experts: per expert, w1/w3/w2, fused, transposed with bias, no gate, and code of its own.
QUICK = ["deepseek_v3", "mixtral", "granitemoe", "gpt_oss", "nemotron_h", "dbrx", "llama4", "qwen3_vl_moe/composite"]

# The share of experts that must matter, where it is less than most of them.
FEWER = {
    "ernie4_5_vl_moe": 0.3,  # half its experts are for image tokens only
    "nllb_moe": 0.2,  # an error upstream: only experts 0 and 1 ever run
    "zaya": 0.4,  # one expert per token
}


def test_every_experts_class_has_a_tiny_model() -> None:
    made = {type(m).__name__ for name in tiny.families() for m in tiny.experts_modules(tiny.make(name)).values()}
    wanted = decorated_classes().keys() | own_code_classes().keys()
    assert wanted - made - OUT_OF_SCOPE.keys() == set()


@pytest.mark.parametrize("name", QUICK)
def test_a_checkpoint_comes_back_bit_equal(name: str, tmp_path: Path) -> None:
    model = tiny.make(name)
    given = tiny.inputs(name, model)
    tiny.save(name, tmp_path)
    assert torch.equal(tiny.logits(model, given), tiny.logits(tiny.load(name, tmp_path), given))


@pytest.mark.parametrize("name", QUICK)
def test_experts_matter_for_the_logits(name: str) -> None:
    model = tiny.make(name)
    assert len(tiny.experts_modules(model)) >= 2
    assert tiny.experts_matter(model, tiny.inputs(name, model)) > FEWER.get(name, 0.7)


def test_the_seed_decides_the_weights() -> None:
    first, same, other = (tiny.make("mixtral", seed).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_making_a_model_leaves_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    tiny.make("mixtral")
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("write", "original", "least"), [(save_fp8, fp8_original, 0.98), (save_mxfp4, mxfp4_original, 0.9)]
)
def test_quantised_checkpoints_load_and_resemble_their_original(write, original, least, tmp_path: Path) -> None:
    write(tmp_path)
    loaded = load_dequantised(tmp_path)
    given = tiny.inputs("", loaded)
    assert agreement(tiny.logits(original(), given), tiny.logits(loaded, given)) > least
