"""A model's files lie in its folder: names and links that lead elsewhere are refused, and not written through."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
from store_samples import content, plan_of, write_pack

import hotset
from hotset import reference
from hotset.errors import HotsetError, StoreError
from hotset.models.packing import pack
from hotset.store.journal import JOURNAL_FILE
from hotset.store.pack import Packer
from hotset.store.packed import BLOCKS_FILE


@pytest.fixture
def model(tmp_path: Path) -> Path:
    with tiny.quiet():
        tiny.make("mixtral").save_pretrained(tmp_path / "model", max_shard_size="60KB")
    return tmp_path / "model"


def through_hotset(folder: Path, **options: Any) -> Any:
    with tiny.quiet():
        return hotset.load(str(folder), memory="50%", device="cpu", **options)


def assert_refused(folder: Path, why: str) -> None:
    with pytest.raises(StoreError, match=why):
        through_hotset(folder)
    with tiny.quiet(), pytest.raises(StoreError, match=why):
        pack(folder, folder.with_name("refused"))
    assert not folder.with_name("refused").exists()
    assert not folder.with_name("refused.part").exists()


@pytest.mark.parametrize("kind", ["above", "absolute"])
def test_an_index_names_files_of_its_folder_only(kind: str, model: Path, tmp_path: Path) -> None:
    index = json.loads((model / "model.safetensors.index.json").read_text())
    moved = sorted(set(index["weight_map"].values()))[1]
    (tmp_path / "private").mkdir()
    shutil.move(model / moved, tmp_path / "private" / moved)
    other = f"../private/{moved}" if kind == "above" else str(tmp_path / "private" / moved)
    index["weight_map"] = {name: other if file == moved else file for name, file in index["weight_map"].items()}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(model, r"lies outside \S+/model: an index names")


def test_weights_that_are_a_link_out_of_the_folder_are_refused(model: Path, tmp_path: Path) -> None:
    shard = sorted(model.glob("*.safetensors"))[1]
    shutil.move(shard, tmp_path / "elsewhere.safetensors")
    shard.symlink_to(tmp_path / "elsewhere.safetensors")
    assert_refused(model, rf"{shard.name} is a link to \S+elsewhere\.safetensors, outside the model's folder")


def as_in_the_hub(model: Path, tmp_path: Path) -> Path:
    """The same files as the hub's client keeps them: links to blobs beside the snapshots."""
    root = tmp_path / "models--org--name"
    snapshot, blobs = root / "snapshots" / "abc", root / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", str(number)))
    return snapshot


def test_links_into_the_cache_of_the_hub_are_followed(model: Path, tmp_path: Path) -> None:
    snapshot = as_in_the_hub(model, tmp_path)
    through_hotset(snapshot).hotset.close()
    with tiny.quiet():
        pack(snapshot, tmp_path / "pack")
    assert not any(file.is_symlink() for file in (tmp_path / "pack").rglob("*"))
    through_hotset(tmp_path / "pack").hotset.close()


def test_a_folder_that_is_itself_a_link_is_followed(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    through_hotset(tmp_path / "link").hotset.close()


@pytest.mark.parametrize("name", ["notes.txt", "tokenizer.json", "additional_chat_templates"])
def test_pack_copies_nothing_that_a_link_brings_from_elsewhere(name: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("the key")
    target = tmp_path / "secret" if name.startswith("additional") else tmp_path / "secret" / "key"
    (model / name).symlink_to(target)
    with (
        tiny.quiet(),
        pytest.raises(StoreError, match=rf"{name}\S* is a link to .*outside the model's folder"),
    ):
        pack(model, tmp_path / "pack")
    assert not (tmp_path / "pack").exists()
    assert not (tmp_path / "pack.part").exists()


@pytest.mark.parametrize("name", [BLOCKS_FILE, JOURNAL_FILE, "model.safetensors", "config.json"])
@pytest.mark.parametrize("hard", [False, True])
def test_nothing_is_written_through_links_in_a_folder_that_was_prepared(name: str, hard: bool, tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    part = tmp_path / "pack.part"
    part.mkdir()
    (part / JOURNAL_FILE).touch()
    (part / name).unlink(missing_ok=True)
    if hard:
        os.link(tmp_path / "victim", part / name)
    else:
        (part / name).symlink_to(tmp_path / "victim")
    with pytest.raises(StoreError, match=rf"{name} is a link, and nothing is written .*: remove \S+pack\.part"):
        write_pack(tmp_path / "pack")
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_an_unfinished_pack_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "pack.part").symlink_to(tmp_path / "victim")
    with pytest.raises(StoreError, match=r"pack\.part is a link"):
        write_pack(tmp_path / "pack")
    assert content(tmp_path / "victim") == {}


def test_a_link_that_leads_nowhere_is_no_place_for_a_pack(tmp_path: Path) -> None:
    (tmp_path / "pack").symlink_to(tmp_path / "nowhere")
    with pytest.raises(HotsetError, match="exists: choose another name"):
        pack(reference.path(), tmp_path / "pack")


def test_an_unfinished_pack_is_still_taken_over(tmp_path: Path) -> None:
    plan = plan_of()
    Packer(tmp_path / "pack", plan).close()
    (tmp_path / "pack.part" / ".config.json.hotset-abcdefgh.part").mkdir()
    write_pack(tmp_path / "pack", plan)
    assert not list((tmp_path / "pack").glob(".*"))
