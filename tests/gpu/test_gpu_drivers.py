"""`hotset run` on a GPU by either driver, and with a disk behind the RAM tier: in float32 the text is stock's."""

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


@pytest.mark.parametrize("engine", ["host", "device"])
def test_run_with_either_driver(folder: Path, stock: Any, engine: str) -> None:
    assert run(folder, "--memory", "25%", "--engine", engine)["text"] == stock(PROMPT)


def test_run_with_half_of_the_experts_in_ram_and_the_disk_behind(folder: Path, stock: Any) -> None:
    found = run(folder, "--memory", "12.5%", "--host-memory", "50%")
    assert found["text"] == stock(PROMPT)
    assert found["driven_by"] == "host"
