"""`--experts`: experts as a checkpoint has them, expanded, or made small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calls import FEW, PROMPT, call

from hotset import reference

pytest.importorskip("torch")
pytest.importorskip("transformers")


def test_a_small_pack_runs_and_is_verified(tmp_path: Path) -> None:
    out = tmp_path / "small"
    told = call("pack", reference.path(), "-o", out, "--experts", "int8", "--json")
    assert told.code == 0, told
    assert json.loads(told.out)["experts"] > 0
    assert call("pack", "--verify", out).code == 0
    plain = (Path(reference.path()) / "model.safetensors").stat().st_size
    assert sum(file.stat().st_size for file in out.iterdir()) < 0.75 * plain
    ended = call("run", out, *FEW, *PROMPT)
    assert ended.code == 0, ended
    assert ended.out.strip()
    assert "holds its experts as integer" in call("run", out, *FEW, *PROMPT, "--experts", "dense").error


@pytest.mark.parametrize(
    "words",
    [
        ("pack", "MODEL", "-o", "OUT", "--experts", "int3"), ("run", "MODEL", *PROMPT, "--experts", "int4"),
        ("pack", "MODEL", "-o", "OUT", "--experts", ""),
    ],
)  # fmt: skip
def test_what_experts_cannot_be(words: tuple[str, ...], tmp_path: Path) -> None:
    places = {"MODEL": str(reference.path()), "OUT": str(tmp_path / "out")}
    said = call(*(places.get(word, word) for word in words)).error
    assert "auto, dense" in said
    assert not (tmp_path / "out").exists()
