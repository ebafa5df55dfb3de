"""A packed model on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpu_commands import PROMPT, hotset, run  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


def test_a_packed_model_says_the_same(folder: Path, stock: Any, tmp_path: Path) -> None:
    hotset("pack", folder, "-o", tmp_path / "packed", "--dtype", "float32")
    hotset("pack", "--verify", tmp_path / "packed")
    assert run(tmp_path / "packed", "--memory", "25%")["text"] == stock(PROMPT)
