"""A policy of a file serves a live model, and its replay gives the same hits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calls import FEW, PROMPT, call

OWN = Path(__file__).parents[2] / "examples" / "own_policy.py"

pytestmark = pytest.mark.filterwarnings("default")


def test_a_live_run_and_its_replay(tmp_path: Path) -> None:
    out = tmp_path / "run.safetensors"
    live = call("run", *PROMPT, *FEW, "--policy", OWN, "--prefetch", "off", "--trace", out, "--json")
    assert live.code == 0, live.err
    stats = json.loads(live.out)["stats"]
    assert stats["policy"] == "lru2"
    replay = call("simulate", out, "-p", OWN, "-b", f"{stats['slots']} slots", "--fit", "0", "--json")
    assert replay.code == 0, replay.err
    rows = json.loads(replay.out)["rows"]
    (row,) = (row for row in rows if (row["policy"], row["phase"]) == ("lru2", "decode"))
    assert (row["hits"], row["misses"]) == (stats["decode"]["hits"], stats["decode"]["misses"])


def test_a_file_that_is_no_policy_ends_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("POLICY = 3")
    assert "does not define POLICY" in call("run", *PROMPT, *FEW, "--policy", tmp_path / "own.py").error
    assert "there is no file" in call("run", *PROMPT, *FEW, "--policy", tmp_path / "none.py").error
