"""`hotset run` on a GPU at every size, the prompt at once after loading: in float32 the text is stock's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpu_commands import PROMPT, run  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("memory", ["12.5%", "25%", "50%", "100%"])
def test_run_says_what_stock_says_at_every_size(folder: Path, stock: Any, memory: str) -> None:
    found = run(folder, "--memory", memory)
    assert found["text"] == stock(PROMPT)
    assert (found["engine"] == "stock") == (memory == "100%")
    if memory != "100%":
        stats = found["stats"]
        assert stats["hits"] + stats["misses"] == stats["asked"]
