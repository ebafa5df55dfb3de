"""`--experts`: experts as a checkpoint has them, expanded, or made small."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from calls import FEW, PROMPT, call

from hotset import reference
from hotset.cli import doctor_machine

pytest.importorskip("torch")
pytest.importorskip("transformers")

import encoded_models
import published


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


@pytest.mark.parametrize(
    "more",
    [
        ("--experts", "mixed"), ("--experts", "mixed", "--profile", "italian", "--target", "6GiB"),
        ("--experts", "int4", "--target", "6GiB"),
    ],
)  # fmt: skip
def test_mixed_experts_say_why_not_and_where_to_read(more: tuple[str, ...], tmp_path: Path) -> None:
    ended = call("pack", reference.path(), "-o", tmp_path / "out", *more)
    assert ended.code == 2
    assert "not packed as mixed" in ended.error
    assert "docs/results/lowbit.md" in ended.error
    assert ended.error.strip().count("\n") == 0
    assert not (tmp_path / "out").exists()


def doctor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    """What the doctor says of a model, as JSON and to people."""
    monkeypatch.setattr(doctor_machine, "SAMPLE_BYTES", 16 << 20)
    monkeypatch.setattr(doctor_machine, "SECONDS_EACH", 0.01)
    return json.loads(call("doctor", folder, "--json").out)["model"], " ".join(call("doctor", folder).out.split())


@pytest.mark.parametrize(
    ("name", "stored", "shown"),
    [
        ("fp8, DeepSeek-V3", "fp8", "fp8, in memory fp8:block_n=16,block_k=16"),
        ("gptq", "gptq", "gptq, in memory integer:group=16,scales=float16,zeros=bytes"),
        ("awq", "awq", "awq, in memory integer:group=16,scales=float16,zeros=bytes"),
        ("", "bfloat16", "bfloat16"),
    ],
)  # fmt: skip
def test_the_doctor_shows_the_format_of_a_checkpoint(
    name: str, stored: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(reference.path())
    if name:
        kind = published.PUBLISHED[name]
        folder = encoded_models.rewrite(folder, tmp_path / "encoded", lambda key, m: kind.named(key, m.float()))
        encoded_models.edit_config(folder, quantization_config=kind.config)
    found, text = doctor(folder, monkeypatch)
    assert (found["experts_format"]["stored"], found["experts_format"]["expanded"]) == (stored, None)
    assert f"experts stored as {shown}" in text


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("Q8_0", "gguf, in memory gguf:kind=Q8_0"),
        (
            "IQ2_XXS",
            "gguf, in memory bfloat16, gguf:kind=Q8_0; GGUF IQ2_XXS: expanded to plain numbers whenever read",
        ),
    ],
)
def test_the_doctor_shows_the_types_of_a_gguf_file(
    kind: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf_models = pytest.importorskip("gguf_models")
    file = gguf_models.from_folder(
        Path(reference.path()), tmp_path / "m.gguf", gguf_models.matrices_as(kind, "BF16", down="Q8_0")
    )
    found, text = doctor(file, monkeypatch)
    assert found["experts_format"]["stored"] == "gguf"
    assert f"experts stored as {shown}" in text


def test_a_config_that_does_not_say_its_method_names_what_is_missing(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(reference.path(), tmp_path / "model"))
    for wrong in ({"bits": 4}, {"quant_method": None}):
        encoded_models.edit_config(folder, quantization_config=wrong)
        said = call("run", folder, *FEW, *PROMPT).error
        assert "does not say its quant_method" in said
        assert "hotset pack --experts int4" in said
        assert "None" not in said
