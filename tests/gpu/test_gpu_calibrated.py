"""A pack whose scales were chosen by text, on a GPU: the same bits at every size, and one text by either driver."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path[:0] = [str(Path(__file__).parents[1] / "formats")]

from format_runs import PROMPTS, all_agree  # noqa: E402
from gpu_commands import hotset  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


def test_a_calibrated_pack_is_served_by_both_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hotset import reference

    monkeypatch.setenv("HOTSET_TUNE", "0")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(prompt.text for prompt in reference.workload("it").prompts[:8]))
    words = ("--experts", "int4", "--calibrate", text, "--no-quality", "--dtype", "float32")
    hotset("pack", reference.path(), "-o", tmp_path / "packed", *words)
    found = all_agree(tmp_path / "packed", torch.float32)
    for name in PROMPTS:
        assert found["device"][name][0] == found["host"][name][0], name
