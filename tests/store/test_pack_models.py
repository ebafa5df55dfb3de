"""`hotset pack` on whole models: the same weights bit for bit, the same answers, and errors that name the remedy."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tiny
import torch
from calls import call
from quantised import save_fp8, save_mxfp4
from safetensors.torch import load_file
from store_samples import content, forge

import hotset
from hotset import reference
from hotset.errors import HotsetError, ModelError, StoreError
from hotset.models import packing
from hotset.models.packing import pack
from hotset.store import dense
from hotset.store.catalog import Bytes
from hotset.store.packed import BLOCKS_FILE, INDEX_FILE, open_index, open_packed
from hotset.store.plan import PackKey
from hotset.store.verify import verify_packed


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packs") / "reference"
    pack(reference.path(), folder)
    return folder


def stock(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with tiny.quiet():
        return AutoModelForCausalLM.from_pretrained(folder, **({"dtype": "auto"} | options)).eval()


def through_hotset(folder: Path, **options: Any) -> Any:
    with tiny.quiet():
        return hotset.load(str(folder), **({"memory": "50%", "device": "cpu"} | options))


def raw(tensor: torch.Tensor) -> Bytes:
    flat: Bytes = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return flat


def assert_experts_equal(folder: Path, model: Any) -> None:
    """Every expert in the file is, bit for bit, what transformers makes of the source."""
    plan = open_index(folder).plan
    blocks = np.memmap(folder / BLOCKS_FILE, np.uint8, mode="r")
    for key in plan.keys():  # noqa: SIM118
        layer, at = plan.layers[key.layer], plan.offset(key)
        for part in layer.layout.parts:
            parameter = model.get_parameter(f"{layer.name}.{part.name}")[key.expert]
            stored = blocks[at + part.offset : at + part.offset + part.size_bytes]
            assert np.array_equal(stored, raw(parameter)), f"{plan.name(key)}, {part.name}"


def assert_alike(source: Any, ours: Any, given: dict[str, torch.Tensor], tolerance: float = 1e-4) -> None:
    """The same weights outside the experts, and the same logits but for rounding, which alignment alone can change."""
    before, after = source.state_dict(), ours.state_dict()
    assert after.keys() <= before.keys()
    assert all(torch.equal(before[name], after[name]) for name in after)
    assert any("embed" in name for name in after)
    expected = tiny.logits(source, given)
    assert torch.allclose(expected, tiny.logits(ours, given), atol=tolerance * float(expected.abs().max()), rtol=0)


def test_the_reference_model_is_packed_bit_for_bit(packed: Path) -> None:
    model = stock(reference.path())
    assert_experts_equal(packed, model)
    source, kept = load_file(reference.path() / "model.safetensors"), load_file(packed / "model.safetensors")
    assert kept.keys() == {name for name in source if ".experts." not in name}
    assert all(np.array_equal(raw(tensor), raw(source[name])) for name, tensor in kept.items())
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (packed / name).read_bytes() == (reference.path() / name).read_bytes()
    assert verify_packed(packed).experts == 512


def test_a_pack_runs_like_its_source(packed: Path) -> None:
    source = through_hotset(reference.path())
    for memory in ("50%", "100%"):  # even if all fit, nothing may be left to a loader that cannot read the blocks
        ours = through_hotset(packed, memory=memory)
        assert_alike(source, ours, {"input_ids": torch.arange(3, 40)[None]}, 0.02)
        assert ours.hotset.stats()["misses"] > 0
        ours.hotset.close()
    source.hotset.close()


def test_a_sharded_model_with_sharded_dense_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.quiet():
        tiny.make("mixtral").save_pretrained(tmp_path / "model", max_shard_size="30KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    monkeypatch.setattr(packing, "shards_of", lambda tensors: dense.shards_of(tensors, 20_000))
    report = pack(tmp_path / "model", tmp_path / "pack")
    assert "model.safetensors.index.json" in report.files
    assert len(list((tmp_path / "pack").glob("model-*.safetensors"))) > 1
    for file in (tmp_path / "pack").glob("*.safetensors"):
        assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0, "tensors would not be aligned"
    model = stock(tmp_path / "model")
    assert_experts_equal(tmp_path / "pack", model)
    ours = through_hotset(tmp_path / "pack")
    assert_alike(model, ours, tiny.inputs("mixtral", model))
    ours.hotset.close()


@pytest.mark.parametrize("name", ["gpt_oss", "granitemoe", "deepseek_v3"])
def test_transposed_and_fused_checkpoints(name: str, tmp_path: Path) -> None:
    tiny.save(name, tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "pack")
    source, ours = stock(tmp_path / "model"), through_hotset(tmp_path / "pack")
    assert_experts_equal(tmp_path / "pack", source)
    assert_alike(source, ours, tiny.inputs(name, ours))
    assert all(layer.decode is None for layer in open_packed(tmp_path / "pack").layers)
    ours.hotset.close()


@pytest.mark.parametrize("save", [save_fp8, save_mxfp4])
def test_quantised_experts_are_widened_and_dense_weights_are_left(save: Any, tmp_path: Path) -> None:
    save(tmp_path / "model")
    with tiny.quiet():
        pack(tmp_path / "model", tmp_path / "pack", experts="dense")
    source, ours = stock(tmp_path / "model"), through_hotset(tmp_path / "pack")
    assert_experts_equal(tmp_path / "pack", source)
    assert_alike(source, ours, tiny.inputs("", ours), 0.02)
    assert {part.dtype for layer in open_packed(tmp_path / "pack").layers for part in layer.layout.parts} <= {
        "bfloat16",
        "float32",
    }
    kept, stored = load_file(tmp_path / "pack/model.safetensors"), load_file(tmp_path / "model/model.safetensors")
    assert kept.keys() == {name for name in stored if ".experts." not in name}
    assert all(kept[name].dtype == stored[name].dtype for name in kept)
    ours.hotset.close()


def test_another_type_is_packed_and_loaded_without_saying_so_again(tmp_path: Path) -> None:
    pack(reference.path(), tmp_path / "pack", dtype="float32")
    assert_experts_equal(tmp_path / "pack", stock(reference.path(), dtype="float32"))
    ours = through_hotset(tmp_path / "pack")
    assert ours.dtype == torch.float32
    ours.hotset.close()
    with pytest.raises(ModelError, match=r"packed for a model in float32, and it is to run in bfloat16: .*--dtype"):
        through_hotset(tmp_path / "pack", dtype="bfloat16")


def test_packing_twice_says_that_it_is_done(packed: Path) -> None:
    before = content(packed)
    assert pack(reference.path(), packed).complete_already
    assert content(packed) == before
    with pytest.raises(HotsetError, match=r"is a pack of another model.*choose another name, or remove it"):
        pack(reference.path(), packed, dtype="float32")


def test_a_folder_that_exists_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HotsetError, match="exists: choose another name"):
        pack(reference.path(), tmp_path)


def copy_of(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "copy"))


def test_a_pack_of_another_model_is_refused_by_name(packed: Path, tmp_path: Path) -> None:
    folder = copy_of(packed, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for change, why in (
        ({"num_hidden_layers": 9}, r"the model has 9 layers, which the pack has not \(8 layers\)"),
        ({"num_hidden_layers": 7}, r"the model has 7 layers"),
        ({"num_local_experts": 32}, r"mlp\.experts has 32 experts, and 64 in the pack"),
        ({"moe_intermediate_size": 64}, r"of model\.layers\.0\.mlp\.experts is not \["),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match=rf"experts\.hotset is of another model .*{why}.*; pack the model again"):
            through_hotset(folder)


def test_a_layer_of_another_name_is_refused(packed: Path, tmp_path: Path) -> None:
    folder = copy_of(packed, tmp_path)
    document = json.loads((folder / INDEX_FILE).read_text())
    document["layers"][3]["name"] = "model.layers.3.mlp.specialists"
    forge(folder / INDEX_FILE, document)
    with pytest.raises(ModelError, match=r"the model has model\.layers\.3\.mlp\.experts, which the pack has not"):
        through_hotset(folder)


def test_a_flipped_bit_is_found_while_the_model_runs(packed: Path, tmp_path: Path) -> None:
    folder = copy_of(packed, tmp_path)
    plan = open_index(folder).plan
    with (folder / BLOCKS_FILE).open("r+b") as file:
        for expert in range(64):
            file.seek(plan.offset(PackKey(2, expert)) + 100)
            file.write(b"rust")
    ours = through_hotset(folder)
    with pytest.raises(StoreError, match=r"layer 2, expert \d+ does not match its digest: .*copy/experts\.hotset"):
        ours(torch.arange(3, 9)[None])
    ours.hotset.close()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("at", [0, 9, 60, 900, -1])
def test_a_flipped_bit_in_the_dense_part_is_found_while_loading(at: int, packed: Path, tmp_path: Path) -> None:
    folder = copy_of(packed, tmp_path)
    flip(folder / "model.safetensors", at)
    for memory in ("50%", "100%"):
        with pytest.raises(StoreError, match=r"model\.safetensors does not match its digest: .*pack the model again"):
            through_hotset(folder, memory=memory)
    with pytest.raises(StoreError, match=r"damaged: \S*model\.safetensors; pack"):
        verify_packed(folder)


def older(folder: Path) -> None:
    """Make a pack what earlier versions made: one digest for a file with weights, none for the small files."""
    document = json.loads((folder / INDEX_FILE).read_text())
    del document["small"]
    for file in document["files"].values():
        del file["chunks"]
    forge(folder / INDEX_FILE, document)


def test_a_pack_of_an_earlier_version_loads_and_is_checked(packed: Path, tmp_path: Path) -> None:
    folder = copy_of(packed, tmp_path)
    older(folder)
    through_hotset(folder).hotset.close()
    done = call("pack", "--verify", folder)
    assert done.code == 0
    assert "it has no digests for config.json" in done.err
    assert len(done.err.splitlines()) == 1
    flip(folder / "model.safetensors", 60)
    with pytest.raises(StoreError, match=r"model\.safetensors does not match its digest"):
        through_hotset(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"])
def test_small_files_are_verified_as_well(name: str, packed: Path, tmp_path: Path) -> None:
    folder = copy_of(packed, tmp_path)
    flip(folder / name, 20)
    with pytest.raises(StoreError, match=rf"damaged: \S*{name}; pack the model again"):
        verify_packed(folder)
    (folder / name).unlink()
    with pytest.raises(StoreError, match=rf"damaged: \S*{name}; pack the model again"):
        verify_packed(folder)


def test_templates_in_a_folder_of_their_own_are_packed_and_verified(packed: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(reference.path(), tmp_path / "model"))
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/short.jinja").write_text("{{ messages[0].content }}")
    pack(source, tmp_path / "pack")
    assert verify_packed(tmp_path / "pack").small == verify_packed(packed).small + 1
    flip(tmp_path / "pack/additional_chat_templates/short.jinja", 3)
    with pytest.raises(StoreError, match=r"additional_chat_templates/short\.jinja"):
        verify_packed(tmp_path / "pack")


def test_truncated_blocks_are_refused_while_loading(packed: Path, tmp_path: Path) -> None:
    folder = copy_of(packed, tmp_path)
    os.truncate(folder / BLOCKS_FILE, 5000)
    with pytest.raises(StoreError, match=r"experts\.hotset is truncated: it has 5,000 of"):
        through_hotset(folder)


def test_a_model_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="cannot read the model"):
        pack(tmp_path / "empty", tmp_path / "pack")
    assert not (tmp_path / "pack.part").exists()


SLOWLY = """
import sys, time
from hotset.models.packing import pack
from hotset.store import pack as writer
writer.COMMIT_BYTES = 1 << 20
def show(done, total):
    print(done, flush=True)
    time.sleep(0.001)
pack(sys.argv[1], sys.argv[2], progress=show)
"""


def test_a_killed_pack_of_a_model_is_finished_byte_for_byte(packed: Path, tmp_path: Path) -> None:
    out, dice = tmp_path / "pack", random.Random()  # noqa: S311
    for share in (0.2, 0.6):
        command = [sys.executable, "-c", SLOWLY, str(reference.path()), str(out)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if int(line) > share * 60e6:
                    time.sleep(dice.uniform(0, 0.02))
                    process.kill()
                    break
        assert not out.exists()
    report = pack(reference.path(), out)
    assert 100 < report.resumed <= 512
    assert content(out) == content(packed)


def test_the_command_packs_and_verifies(tmp_path: Path) -> None:
    out = tmp_path / "pack"
    done = call("pack", reference.path(), "-o", out, "--json")
    told = f"note: {out} is in a folder for temporary files: hotset models does not list it, name it by its path"
    assert (done.code, done.err.strip()) == (0, told)
    document = json.loads(done.out)
    assert document["experts"] == 512
    assert document["digests"] == 512 + len(content(out)) - 2  # all but the blocks' file and the index have their own
    assert document["resumed"] == 0
    assert document["bytes"] == sum(len(data) for data in content(out).values())
    assert set(document["files"]) == set(content(out))
    assert document["seconds"] > 0
    again = call("pack", reference.path(), "-o", out)
    assert again.code == 0
    assert "complete pack of this model already" in again.out
    right = call("pack", "--verify", out, "--json")
    assert right.code == 0
    assert json.loads(right.out)["damaged"] == 0
    with (out / BLOCKS_FILE).open("r+b") as file:
        file.seek(open_index(out).plan.offset(PackKey(1, 7)))
        file.write(b"rust")
    assert call("pack", "--verify", out).error.startswith("damaged: layer 1 (model.layers.1.mlp.experts), expert 7 in ")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "give a model and the folder to write"),
        (["some-model"], "give a model and the folder to write"),
        (["some-model", "--verify", "x"], "--verify takes the folder of a pack and nothing else"),
        (["--verify", "/nowhere"], "/nowhere is no packed model"),
        (["/nowhere/model", "-o", "x"], "there is no folder /nowhere/model"),
        (["some-model", "-o", "x", "--dtype", "int3"], "no type is called int3"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], why: str) -> None:
    assert call("pack", *words).error.startswith(why)
