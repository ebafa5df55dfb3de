"""Checkpoints in packed formats on a GPU in bfloat16 and float16, and gpt-oss in MXFP4: the same bits at every size."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path[:0] = [str(Path(__file__).parents[1] / "formats"), str(Path(__file__).parents[1] / "families")]

import quantised  # noqa: E402
from format_runs import DENSE, all_agree, encoded, make_plain, served  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def _untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_TUNE", "0")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plain(tmp_path_factory.mktemp("plain") / "model")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("mxfp4, compressed-tensors", "bfloat16"),
        ("int4, Kimi-K2", "bfloat16"),
        ("fp8, DeepSeek-V3", "bfloat16"),
        ("int8 by row", "float16"),
    ],
)
def test_narrow_types_are_the_same_at_every_size(name: str, dtype: str, plain: Path, tmp_path: Path) -> None:
    found: dict[str, Any] = all_agree(encoded(plain, tmp_path / "encoded", name), getattr(torch, dtype))
    assert all(bool(logits.isfinite().all()) for runs in found.values() for _, logits in runs.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpt_oss_is_served_in_mxfp4(dtype: torch.dtype, tmp_path: Path) -> None:
    quantised.save_mxfp4(tmp_path / "model")
    found = all_agree(tmp_path / "model", dtype)
    for driver, (prompt, (text, logits)) in product(found, served(tmp_path / "model", dtype, DENSE, 0).items()):
        near = 1e-3 if dtype == torch.float32 else 0.1
        assert torch.allclose(found[driver][prompt][1][0], logits[0], atol=near), (driver, prompt)
        assert dtype != torch.float32 or found[driver][prompt][0] == text, (driver, prompt)
