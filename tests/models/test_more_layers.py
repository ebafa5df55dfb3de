"""A checkpoint with more layers than its config counts is refused, unless those predict further tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file

import hotset
from hotset.errors import ModelError

LAYERS = 3
JOINING = ("eh_proj", "enorm", "hnorm")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in ("qwen3_moe", "deepseek_v3", "glm4_moe")}
    for name, folder in found.items():
        tiny.save(name, folder)
    return found


def with_layer(source: Path, folder: Path, number: int, joining: tuple[str, ...] = (), **config: Any) -> Path:
    """A checkpoint that has its last layer a second time, under another number and with other tensors beside."""
    tensors, last = load_file(source / "model.safetensors"), f"model.layers.{LAYERS - 1}."
    more = {name.replace(last, f"model.layers.{number}."): t.clone() for name, t in tensors.items() if last in name}
    more |= {f"model.layers.{number}.{word}.weight": torch.ones(4) for word in joining}
    save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | config))
    return folder


def loads(folder: Path, memory: str = "50%") -> Any:
    with tiny.quiet():
        model = hotset.load(folder, memory=memory, device="cpu")
    with torch.no_grad():
        logits = model(torch.tensor([[5, 9, 31]])).logits
    model.hotset.close()
    return logits


@pytest.mark.parametrize("memory", ["50%", "100%"])
def test_layers_that_the_config_does_not_count_are_refused(memory: str, saved: dict[str, Path], tmp_path: Path) -> None:
    folder = with_layer(saved["qwen3_moe"], tmp_path, LAYERS, num_hidden_layers=LAYERS)
    with pytest.raises(ModelError, match=r"holds model\.layers\.3\.\S+, of layer 3 .* its config counts 3 layers"):
        loads(folder, memory)


def test_experts_alone_are_enough(saved: dict[str, Path], tmp_path: Path) -> None:
    folder = with_layer(saved["qwen3_moe"], tmp_path, LAYERS)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if ".layers.3." not in name or ".experts." in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"holds model\.layers\.3\.mlp\.experts\.0\."):
        loads(folder)


@pytest.mark.parametrize(("name", "number"), [("deepseek_v3", 61), ("glm4_moe", 46), ("glm4_moe", 92)])
def test_what_a_family_passes_over_is_passed_over(
    name: str, number: int, saved: dict[str, Path], tmp_path: Path
) -> None:
    assert torch.equal(loads(with_layer(saved[name], tmp_path, number)), loads(saved[name]))


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_layers_that_predict_further_tokens_are_passed_over(name: str, saved: dict[str, Path], tmp_path: Path) -> None:
    said = {"num_nextn_predict_layers": 1}
    assert torch.equal(loads(with_layer(saved[name], tmp_path, LAYERS, JOINING, **said)), loads(saved[name]))
    with_layer(saved[name], tmp_path, LAYERS, JOINING, num_nextn_predict_layers=0)
    with pytest.raises(ModelError, match="its config counts 3 layers"):
        loads(tmp_path)
    with_layer(saved[name], tmp_path, LAYERS, **said)  # a layer like all others predicts no further token
    with pytest.raises(ModelError, match="its config counts 3 layers"):
        loads(tmp_path)
