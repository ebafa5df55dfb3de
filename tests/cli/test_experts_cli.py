"""`--experts`: experts as a checkpoint has them, expanded, or made small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calls import FEW, PROMPT, call

from hotset import reference
from hotset.cli import doctor_machine

pytest.importorskip("torch")
pytest.importorskip("transformers")


def test_a_small_pack_runs_and_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "SAMPLE_BYTES", 16 << 20)
    monkeypatch.setattr(doctor_machine, "SECONDS_EACH", 0.01)
    out, text, other = tmp_path / "small", tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_text("\n".join(one.text for one in reference.workload("it").prompts[:6]))
    other.write_text("\n".join(one.text for one in reference.workload("fr").prompts[:6]))
    words = ("pack", reference.path(), "-o", out, "--experts", "int8", "--calibrate", other, "--quality", text)
    told = call(*words, "--json")
    assert told.code == 0, told
    document = json.loads(told.out)
    assert document["experts"] > 0
    assert 0 < document["quality"]["kl_mean"] < 0.01
    assert document["quality"]["same_top"] > 0.9
    again = call(*words)
    assert "is a complete pack of this model already" in again.out
    assert "quality: KL divergence" in again.out
    model = json.loads(call("doctor", out, "--json").out)["model"]
    assert model["pack"]["quality"] == document["quality"]
    assert model["pack"]["calibration"].startswith("other.txt, ")
    assert model["pack"]["formats"] == ["integer:bits=8"]
    shown = call("doctor", out).out
    assert "calibrated on" in shown
    assert "tokens of text.txt" in shown
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
