"""Checkpoints in published formats on a GPU, by either driver: the same bits at every size, and stock's text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path[:0] = [str(Path(__file__).parents[1] / "formats"), str(Path(__file__).parents[1] / "families")]

import encoded_models  # noqa: E402
from format_runs import PROMPTS, all_agree, answer, encoded, make_plain  # noqa: E402
from published import PUBLISHED  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
FORMATS = [
    "fp8, DeepSeek-V3", "fp4, DeepSeek-V4", "nvfp4, modelopt", "int4, Kimi-K2", "int8 in groups", "int4, asymmetric",
    "gptq, 8 bits, any order", "awq",
]  # fmt: skip
"""One of each way to decode; each takes seconds to compile."""


@pytest.fixture(autouse=True)
def _untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_TUNE", "0")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plain(tmp_path_factory.mktemp("plain") / "model")


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_served_by_both_drivers_to_the_same_bits(name: str, plain: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    kind = PUBLISHED[name]
    decoded = encoded_models.rewrite(plain, tmp_path / "decoded", lambda key, matrix: {key: kind.back(matrix)})
    stock: Any = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32).to("cuda").eval()
    found = all_agree(encoded(plain, tmp_path / "encoded", name), torch.float32)
    for prompt, length in PROMPTS.items():
        text, logits = answer(stock, length)
        for driver in found:
            assert found[driver][prompt][0] == text, (driver, prompt)
            assert torch.allclose(found[driver][prompt][1], logits, atol=2e-3), (driver, prompt)
