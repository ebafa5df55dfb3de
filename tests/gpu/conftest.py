"""The reference model with wider experts, and what stock transformers answers with it in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from gpu_commands import WIDTH

    from hotset import reference

    return reference.inflate(WIDTH, tmp_path_factory.mktemp("gpu") / "inflated")


@pytest.fixture(scope="module")
def stock(folder: Path) -> Any:
    """What transformers answers to a conversation, in float32."""
    import torch
    from gpu_commands import TOKENS
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="grouped_mm")
    model = model.to("cuda")

    def answer(*turns: str, tokens: int = TOKENS) -> str:
        messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        given = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to("cuda")
        out = model.generate(**given, max_new_tokens=tokens, do_sample=False)
        return str(tokenizer.decode(out[0, given["input_ids"].shape[1] :], skip_special_tokens=True))

    return answer
