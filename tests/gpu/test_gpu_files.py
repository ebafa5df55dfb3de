"""What hotset writes and reads on a machine with a GPU: profiles and traces."""

from __future__ import annotations

import json
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


def test_what_is_learnt_warms_the_next_start(folder: Path, stock: Any, tmp_path: Path) -> None:
    profile = tmp_path / "italian.safetensors"
    assert run(folder, "--memory", "25%", "--learn", profile)["text"] == stock(PROMPT)
    assert "italian" in hotset("profile", "show", profile).stdout
    found = run(folder, "--memory", "25%", "--profile", profile, "--learn", profile)
    assert found["text"] == stock(PROMPT)
    assert found["stats"]["background_bytes"] > 0


def test_a_recording_replays_to_the_same_hits(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("La storia di Roma\nint main(void) {\nDas Wetter in Berlin\n", encoding="utf-8")
    out = tmp_path / "t.safetensors"
    words = ("--prompts", prompts, "-o", out, "--memory", "25%", "--max-new-tokens", 24, "--json")
    found = json.loads(hotset("trace", "record", folder, *words).stdout)
    assert found["requests"] == 3
    replayed = json.loads(hotset("simulate", out, "-p", "blend", "-b", "25%", "--fit", 0, "--json").stdout)
    rows = {row["phase"]: row for row in replayed["rows"] if row["policy"] == "blend"}
    for phase in ("prefill", "decode"):
        live = found["stats"][phase]
        assert (rows[phase]["hits"], rows[phase]["misses"]) == (live["hits"], live["misses"])
