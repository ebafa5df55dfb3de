"""GGUF files on a GPU, by either driver: the same bits at every size, and what dense experts say."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")
sys.path[:0] = [str(Path(__file__).parents[1] / "formats")]

import gguf_models  # noqa: E402
from format_runs import DENSE, all_agree, make_for_blocks, served  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
KINDS = [("Q4_0", "Q4_1"), ("Q4_K", "Q6_K"), ("Q8_0", "Q5_K"), ("MXFP4", "IQ4_NL"), ("IQ4_XS", "Q4_K")]
"""Of the first and the last matrices; each takes seconds to compile. Other pairs are tested with the kernels."""


@pytest.fixture(autouse=True)
def _untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_TUNE", "0")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_for_blocks(tmp_path_factory.mktemp("plain") / "model")


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_blocks_are_served_by_both_drivers(kinds: tuple[str, str], plain: Path, tmp_path: Path) -> None:
    file = gguf_models.from_folder(plain, tmp_path / "a.gguf", gguf_models.matrices_as(kinds[0], down=kinds[1]))
    found = all_agree(file, torch.float32)
    for driver, (prompt, (text, logits)) in product(found, served(file, torch.float32, DENSE, 0).items()):
        assert found[driver][prompt][0] == text, (driver, prompt)
        assert torch.allclose(found[driver][prompt][1], logits, atol=1e-4 * float(logits.abs().max())), (driver, prompt)


def test_blocks_in_bfloat16_are_the_same_at_every_size(plain: Path, tmp_path: Path) -> None:
    file = gguf_models.from_folder(plain, tmp_path / "a.gguf", gguf_models.matrices_as("Q4_K", down="Q6_K"))
    found: dict[str, Any] = all_agree(file, torch.bfloat16)
    for driver, (prompt, (_, logits)) in product(found, served(file, torch.bfloat16, DENSE, 0).items()):
        near = 0.05 * float(logits.abs().max())
        assert torch.allclose(found[driver][prompt][1][0], logits[0], atol=near), (driver, prompt)
