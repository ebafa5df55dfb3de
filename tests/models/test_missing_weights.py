"""A checkpoint that lacks weights is refused by their names: the library would go on with random ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from calls import call
from safetensors.torch import load_file, save_file

import hotset
from hotset.errors import ModelError
from hotset.models.fingerprint import fingerprint_of_folder

LAYER = "model.layers.1."
LACKING = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    f"{LAYER}self_attn.q_proj.weight",
    f"{LAYER}mlp.gate.weight",
    f"{LAYER}input_layernorm.weight",
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny.save("qwen3_moe", folder)
    return folder


def without(saved: Path, folder: Path, *names: str, **changed: torch.Tensor) -> Path:
    tensors = load_file(saved / "model.safetensors")
    for name in names:
        del tensors[name]
    save_file(tensors | changed, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((saved / "config.json").read_bytes())
    return folder


def through_hotset(folder: Path, memory: str = "50%", **options: Any) -> Any:
    with tiny.quiet():
        return hotset.load(str(folder), memory=memory, device="cpu", **options)


@pytest.mark.parametrize("memory", ["50%", "100%"])
@pytest.mark.parametrize("name", LACKING)
def test_a_missing_weight_is_an_error_that_names_it(name: str, memory: str, saved: Path, tmp_path: Path) -> None:
    folder = without(saved, tmp_path, name)
    with pytest.raises(ModelError, match=rf"does not hold {name}: it is incomplete.*; download it again"):
        through_hotset(folder, memory)


def test_of_many_missing_weights_some_are_named_and_all_counted(saved: Path, tmp_path: Path) -> None:
    folder = without(saved, tmp_path, *LACKING)
    with pytest.raises(ModelError, match=r"does not hold lm_head\.weight, .*, model\.layers\.1\.\S+ and 3 more: "):
        through_hotset(folder)


def test_no_fingerprint_is_made_of_a_router_that_is_not_there(saved: Path, tmp_path: Path) -> None:
    folder = without(saved, tmp_path, f"{LAYER}mlp.gate.weight")
    with tiny.quiet(), pytest.raises(ModelError, match=r"mlp\.gate\.weight"):
        fingerprint_of_folder(folder)


@pytest.mark.parametrize("memory", ["50%", "100%"])
def test_a_weight_of_another_shape_is_an_error_that_names_it(memory: str, saved: Path, tmp_path: Path) -> None:
    folder = without(saved, tmp_path, **{"model.norm.weight": torch.ones(3)})
    with pytest.raises(ModelError, match=r"other shapes: model\.norm\.weight \(\[3\], not \[\d+\]\): it is incomplete"):
        through_hotset(folder, memory)


def test_a_weight_that_is_tied_may_be_missing(saved: Path, tmp_path: Path) -> None:
    folder = without(saved, tmp_path, "lm_head.weight")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model = through_hotset(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.hotset.close()


def test_weights_that_the_model_does_not_have_are_ignored_as_ever(saved: Path, tmp_path: Path) -> None:
    folder = without(saved, tmp_path, **{"model.vision.patches.weight": torch.ones(3)})
    through_hotset(folder).hotset.close()


def test_what_a_model_ignores_is_as_it_was_after_the_load(saved: Path) -> None:
    model, stock = through_hotset(saved), tiny.load("qwen3_moe", saved)
    assert model._keys_to_ignore_on_load_unexpected == stock._keys_to_ignore_on_load_unexpected
    model.hotset.close()


def test_the_command_ends_in_one_line(saved: Path, tmp_path: Path) -> None:
    from hotset import reference

    folder = without(saved, tmp_path, f"{LAYER}self_attn.q_proj.weight", f"{LAYER}mlp.gate.weight")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((reference.path() / name).read_bytes())
    done = call("run", folder, "-p", "a", "--memory", "50%", "--device", "cpu")
    assert not done.out
    assert done.error.startswith(f"the checkpoint does not hold {LAYER}mlp.gate.weight, {LAYER}self_attn.q_proj")
