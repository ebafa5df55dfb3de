"""`auto` under a hard limit: the kernel kills nothing. The grid of 27 groups is benchmarks/trust/auto_memory.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hotset import reference

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "trust"))

import auto_memory

import limits

LIMIT_MIB, PROMPT = 700, 900


def test_a_prompt_in_a_small_group_is_answered(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not os.access(limits.GROUPS, os.W_OK):
        pytest.skip("control groups can only be made by the superuser, with cgroup v1")
    try:
        with limits.memory_group(LIMIT_MIB << 20):
            pass
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    model = reference.inflate(1024, tmp_path / "model")
    row = auto_memory.one(model, LIMIT_MIB, PROMPT, 1, 0, 400.0)
    assert row["outcome"] == "worked", row
    assert row["peak_group_bytes"] <= LIMIT_MIB << 20
    assert 8 <= row["slots"] < 512
