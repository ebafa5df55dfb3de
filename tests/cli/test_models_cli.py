"""`hotset models` and `hotset compile`, as a person and as a script calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calls import call

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


def test_compiled_code_is_compiled_once() -> None:
    call("compile")
    assert json.loads(call("compile", "--json").out)["compiled"] == 0
    assert call("compile").out == "all is compiled already\n"
    assert "no policy is called" in call("compile", "--policy", "nobody").error
