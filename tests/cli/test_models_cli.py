"""`hotset models` and `hotset compile`, as a person and as a script calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calls import call

from hotset import reference

pytestmark = pytest.mark.filterwarnings("default")


def test_models_are_listed_with_size_precision_and_whether_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    place = tmp_path / "hub" / "models--org--huge" / "snapshots" / "abc"
    place.mkdir(parents=True)
    (place / "config.json").write_text('{"num_experts": 8, "dtype": "bfloat16"}')
    with (place / "model.safetensors").open("wb") as file:
        file.truncate(1 << 42)  # of holes
    document = json.loads(call("models", "--json").out)
    assert [(row["name"], row["fits"]) for row in document["models"]] == [("reference", True), ("org/huge", False)]
    shown = call("models").out
    assert "4.00 TiB" in shown
    assert "no: a share of its experts does" in shown


def test_a_pack_is_called_by_its_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/no/such/folder")  # that of this test is in a real one
    assert call("pack", reference.path(), "-o", tmp_path / "small", "--experts", "int4", "--no-quality").code == 0
    rows = json.loads(call("models", "--json").out)["models"]
    assert [(row["kind"], row["precision"]) for row in rows if row["name"] == "small"] == [("packed", "int4")]
    assert "packed as" in (shown := call("doctor", tmp_path / "small").out)
    assert "int4" in shown


def test_a_pack_for_now_is_not_remembered_and_a_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (line,) = call("pack", reference.path(), "-o", tmp_path / "small").err.splitlines()
    assert line.startswith(f"note: {tmp_path / 'small'} is in a folder for temporary files: hotset models does not")
    assert "small" not in call("models").out


def test_compiled_code_is_compiled_once() -> None:
    call("compile")
    assert json.loads(call("compile", "--json").out)["compiled"] == 0
    assert call("compile").out == "all is compiled already\n"
    assert "no policy is called" in call("compile", "--policy", "nobody").error
