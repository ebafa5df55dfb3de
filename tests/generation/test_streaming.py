"""Text that is shown as it comes is the text of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hotset import reference
from hotset.generation.streaming import TokenStream

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("name", ["ja", "ru", "latex", "it"])
def test_a_stream_says_what_the_whole_says(tokenizer: Any, name: str) -> None:
    for prompt in reference.workload(name).prompts[:5]:
        ids = tokenizer(prompt.text + " 🦙🇮🇹")["input_ids"]
        pieces: list[str] = []
        stream = TokenStream(tokenizer, pieces.append)
        stream.put(torch.tensor([[0]]))
        for token in ids:
            stream.put(torch.tensor([token]))
        stream.end()
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
        assert not any("\ufffd" in piece for piece in pieces)
        assert len(pieces) > len(ids) // 3
