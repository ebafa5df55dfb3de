"""Models by name: used before, packed here, in the hub's cache, or shipped with hotset."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hotset import reference
from hotset.errors import ModelError
from hotset.generation.known_models import PRECISIONS, all_models, find, remember
from hotset.generation.text_model import locate


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/no/such/folder")  # the home of this test is in a real one
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def hub_model(home: Path, name: str, **config: object) -> Path:
    place = home / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / "abc"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    (place / "model.safetensors").write_bytes(b"x" * 1000)
    return place


def test_a_model_that_was_used_is_found_by_its_name(home: Path) -> None:
    place = home / "my-model"
    shutil.copytree(reference.path(), place)
    with pytest.raises(ModelError, match="a name that hotset models lists"):
        locate("my-model")
    remember(str(place))
    assert locate("my-model") == find("my-model") == str(place)
    (found,) = (model for model in all_models() if model.name == "my-model")
    assert (found.kind, found.precision, found.mixture_of_experts) == ("used here", "bfloat16", True)
    assert found.size_bytes == (reference.path() / "model.safetensors").stat().st_size
    shutil.rmtree(place)
    assert find("my-model") is None
    with pytest.raises(ModelError, match=f"my-model was used from {place}, which is not there any more: give"):
        locate("my-model")
    with pytest.raises(ModelError, match="there is no folder or model my-modle: did you mean my-model"):
        locate("my-modle")
    assert [model.name for model in all_models()] == ["reference"]


def test_folders_for_scratch_are_not_remembered(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(home))
    (home / "m").mkdir()
    remember(str(home / "m"))
    assert find("m") is None


def test_precisions_are_called_as_the_planner_calls_them() -> None:
    from hotset.analysis.planner.model import MORE_SPECS, SPECS

    known = (SPECS | MORE_SPECS).items()
    assert {spec: name for name, spec in known if name != spec} == PRECISIONS


def test_the_cache_of_the_hub_is_listed_and_a_short_name_is_enough(home: Path) -> None:
    hub_model(home, "org/moe-a", num_experts=64, dtype="bfloat16")
    hub_model(home, "org/dense", torch_dtype="float16")
    hub_model(home, "org/small", text_config={"num_local_experts": 8}, quantization_config={"quant_method": "mxfp4"})
    found = {model.name: (model.precision, model.mixture_of_experts, model.size_bytes) for model in all_models()[1:]}
    assert found == {
        "org/dense": ("float16", False, 1000),
        "org/moe-a": ("bfloat16", True, 1000),
        "org/small": ("mxfp4", True, 1000),
    }
    assert locate("moe-a") == "org/moe-a"
    hub_model(home, "other/moe-a", num_experts=8)
    assert find("moe-a") is None
    with pytest.raises(ModelError, match="more than one moe-a in the hub's cache: name one of org/moe-a, other/moe-a"):
        locate("moe-a")


def test_a_damaged_list_is_as_none(home: Path) -> None:
    file = home / "data" / "hotset" / "models.json"
    file.parent.mkdir(parents=True)
    for content in (b"{", b"[]", b'{"a": 3}', b"\xff", b"[" * 100_000):
        file.write_bytes(content)
        assert [model.name for model in all_models()] == ["reference"]
        assert find("a") is None
    assert locate("reference") == str(reference.path())
