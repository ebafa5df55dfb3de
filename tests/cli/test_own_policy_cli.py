"""A policy of a file serves a live model, and its replay gives the same hits."""

from __future__ import annotations

import json
import re
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


def test_what_numba_refuses_ends_in_a_line(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    text = OWN.read_text().replace('name="lru2"', 'name="refused"')
    own.write_text(re.sub(r"(def score\(.*\n(?:    \"\"\".*\n)?)", r'\1    return {"a": 1}["a"]\n', text))
    for words in (("simulate", "reference:it", "-p", own, "-b", "25%"), ("run", *PROMPT, *FEW, "--policy", own)):
        error = call(*words).error
        assert re.match(rf"{re.escape(str(own))}, line \d+: Numba cannot compile ", error)
        assert error.endswith("docs/guide/own-policy.md says under Compiled code")


def test_a_name_that_is_not_known_says_how_a_file_is_named() -> None:
    error = call("simulate", "reference:it", "-p", "mru").error
    assert error.startswith('no policy is called "mru"; there are belady, ')
    assert error.endswith("; one of yours is named by its file, as ./mru.py")
    assert call("forecast", "reference:it", "-f", "mine").error.endswith("as ./mine.py")
