"""An inflated reference model is larger and says the same."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hotset import reference
from hotset.errors import HotsetError

SHARD = 8_000_000


@pytest.fixture(scope="module", params=[48, 64])
def inflated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    folder = tmp_path_factory.mktemp("inflated") / "model"
    assert reference.inflate(request.param, str(folder), shard_bytes=SHARD) == folder
    return request.param, folder


def load(folder: Path) -> Any:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", ["it", "c", "zh"])
def test_logits_and_greedy_tokens_stay(inflated: tuple[int, Path], name: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    text = reference.workload(name).prompts[0].text[:200]
    batch = transformers.AutoTokenizer.from_pretrained(inflated[1])(text, return_tensors="pt")
    small, large = load(reference.path()), load(inflated[1])
    assert large.config.moe_intermediate_size == inflated[0]
    with torch.no_grad():
        torch.testing.assert_close(large(**batch).logits, small(**batch).logits, rtol=1e-4, atol=1e-4)
    options = {"max_new_tokens": 24, "do_sample": False}
    assert torch.equal(large.generate(**batch, **options), small.generate(**batch, **options))


def test_shards_are_bounded_and_indexed(inflated: tuple[int, Path]) -> None:
    from safetensors import safe_open

    width, folder = inflated
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(folder.glob("*.safetensors"))
    assert [path.name for path in shards] == [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]
    assert len(shards) > 2
    sizes = 0
    for path in shards:
        with safe_open(path, "numpy") as file:
            names = list(file.keys())
            shapes = {name: file.get_slice(name).get_shape() for name in names}
        assert all(index["weight_map"].pop(name) == path.name for name in names)
        assert 2 * sum(_numbers(shape) for shape in shapes.values()) <= SHARD
        assert {tuple(s) for n, s in shapes.items() if ".experts." in n} <= {(width, 256), (256, width)}
        sizes += 2 * sum(_numbers(shape) for shape in shapes.values())
    assert not index["weight_map"]
    assert sizes == index["metadata"]["total_size"]


def _numbers(shape: list[int]) -> int:
    return shape[0] * (shape[1] if len(shape) == 2 else 1)


def test_two_runs_write_the_same_bytes(inflated: tuple[int, Path], tmp_path: Path) -> None:
    again = reference.inflate(inflated[0], tmp_path / "again", shard_bytes=SHARD)
    for path in inflated[1].iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes()


def test_the_models_own_width_gives_its_own_weights(tmp_path: Path) -> None:
    folder = reference.inflate(32, tmp_path)
    (shard,) = folder.glob("*.safetensors")
    assert _data(shard) == _data(reference.path() / "model.safetensors")


def _data(path: Path) -> bytes:
    content = path.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


def test_a_smaller_width_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HotsetError, match="ask for 32 or more"):
        reference.inflate(31, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_is_never_overwritten(inflated: tuple[int, Path]) -> None:
    for folder in (inflated[1], reference.path()):
        with pytest.raises(HotsetError, match="holds a checkpoint already"):
            reference.inflate(48, folder)


def test_a_disk_too_small_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1_000_000))
    with pytest.raises(HotsetError, match="GB free; free some space"):
        reference.inflate(48, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_disk_that_fills_up_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []

    def full(handle: int) -> None:
        flushed.append(handle)
        if len(flushed) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HotsetError, match="No space left on device; free some space"):
        reference.inflate(48, tmp_path, shard_bytes=SHARD)
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"] * 2
    monkeypatch.undo()
    assert (reference.inflate(48, tmp_path, shard_bytes=SHARD) / "config.json").exists()


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HotsetError, match="choose another place"):
        reference.inflate(48, tmp_path / "file")


def test_importing_the_reference_loads_nothing_heavy() -> None:
    code = (
        "import sys, hotset.reference; assert callable(hotset.reference.inflate)\n"
        "print([m for m in ('torch', 'numpy', 'safetensors') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
