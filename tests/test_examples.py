"""Every script in examples/ runs on what ships with hotset, and says what it should."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {
    "generate": "decode hit rate",
    "record_and_simulate": "the optimum, which knows the future",
    "warm_start": "warm: the prompt hit",
    "lora_step": "backward passes fetched",
    "own_policy": "lru2",
}


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    monkeypatch.setitem(os.environ, "XDG_DATA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert SAYS[name] in capsys.readouterr().out
    assert not list(tmp_path.iterdir())  # an example leaves nothing behind
