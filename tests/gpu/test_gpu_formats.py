"""Checkpoints in every published format on a GPU, by either driver: the same bits at every size, and dense's text."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path[:0] = [str(Path(__file__).parents[1] / "formats"), str(Path(__file__).parents[1] / "families")]

import encoded_models  # noqa: E402
import quantised  # noqa: E402
from published import PUBLISHED  # noqa: E402

import hotset  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
TOKENS = 12
PROMPTS = {"short": 6, "long": 70}
"""Few tokens go through the kernels of decode steps, many through grouped products."""
SETTINGS = [
    ("100%", "off", "device"), ("50%", "off", "device"), ("30%", "auto", "device"),
    ("100%", "off", "host"), ("50%", "auto", "host"), ("30%", "off", "host"),
]  # fmt: skip
DENSE = ("50%", "off", "host")


@pytest.fixture(autouse=True)
def _untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_TUNE", "0")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=192, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=96,
        initializer_range=0.1, eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("plain") / "model"
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
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


def served(folder: Path, dtype: torch.dtype, setting: tuple[str, ...], matrices: int = 2) -> dict[str, Any]:
    """What a model answers to all prompts at one size, by one driver, with so many matrices of an expert packed."""
    memory, prefetch, engine = setting
    experts = "auto" if matrices else "dense"
    given = {"memory": memory, "prefetch": prefetch, "engine": engine, "dtype": dtype, "device": "cuda"}
    model = hotset.load(folder, **given, experts=experts)
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


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_format_is_served_by_both_drivers_to_the_same_bits(name: str, plain: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    kind = PUBLISHED[name]
    folder = encoded_models.rewrite(plain, tmp_path / "encoded", kind.named)
    encoded_models.edit_config(folder, quantization_config=kind.config)
    decoded = encoded_models.rewrite(plain, tmp_path / "decoded", lambda key, matrix: {key: kind.back(matrix)})
    stock = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32).to("cuda").eval()
    found = all_agree(folder, torch.float32)
    for prompt, length in PROMPTS.items():
        text, logits = answer(stock, length)
        for driver in found:
            assert found[driver][prompt][0] == text, (driver, prompt)
            assert torch.allclose(found[driver][prompt][1], logits, atol=2e-3), (driver, prompt)


@pytest.mark.parametrize("name", ["mxfp4, compressed-tensors", "int4, Kimi-K2", "int8 in groups", "fp8, DeepSeek-V3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_the_same_at_every_size(name: str, dtype: torch.dtype, plain: Path, tmp_path: Path) -> None:
    kind = PUBLISHED[name]
    folder = encoded_models.rewrite(plain, tmp_path / "encoded", kind.named)
    encoded_models.edit_config(folder, quantization_config=kind.config)
    all_agree(folder, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpt_oss_is_served_in_mxfp4(dtype: torch.dtype, tmp_path: Path) -> None:
    quantised.save_mxfp4(tmp_path / "model")
    found = all_agree(tmp_path / "model", dtype)
    for driver, (prompt, (text, logits)) in product(found, served(tmp_path / "model", dtype, DENSE, 0).items()):
        near = 1e-3 if dtype == torch.float32 else 0.1
        assert torch.allclose(found[driver][prompt][1][0], logits[0], atol=near), (driver, prompt)
        assert dtype != torch.float32 or found[driver][prompt][0] == text, (driver, prompt)
