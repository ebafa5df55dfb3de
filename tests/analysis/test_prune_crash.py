"""A prune that is interrupted, killed or starved of space is finished later, byte for byte as if nothing was."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from pruned_models import prune, saliency_of, save  # noqa: E402

from hotset import reference  # noqa: E402
from hotset.analysis import prune_writer, saliency_runs  # noqa: E402
from hotset.analysis.prune import Pruner  # noqa: E402
from hotset.analysis.prune_choice import RouterRules, choose  # noqa: E402
from hotset.analysis.saliency_runs import TextFiles, record_saliency  # noqa: E402
from hotset.errors import HotsetError, StoreError  # noqa: E402
from hotset.options import RunOptions  # noqa: E402


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save("qwen3_moe", tmp_path / "model", norm_topk_prob=True)
    saliency_of(tmp_path / "model").save(tmp_path / "saliency")
    return tmp_path / "model"


def again(model: Path, out: Path, **more: Any) -> Any:
    return prune(model, out, saliency=model.with_name("saliency"), shard_bytes=20_000, **more)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, None])
def test_a_disk_that_fills_up_and_an_interrupt_cost_one_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int | None
) -> None:
    again(model, tmp_path / "undisturbed")
    written = []

    def write(handle: int, data: memoryview) -> int:
        written.append(len(data))
        if len(written) == 100:
            raise KeyboardInterrupt if error is None else OSError(error, os.strerror(error))
        return os.write(handle, data)

    monkeypatch.setattr(prune_writer, "_write", write)
    words = {errno.ENOSPC: "goes on where it stopped", errno.EIO: "choose another place", None: None}[error]
    with pytest.raises(KeyboardInterrupt if error is None else HotsetError, match=words):
        again(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(StoreError, match="an unfinished prune with another criterion"):
        again(model, tmp_path / "out", by="ean")
    report = again(model, tmp_path / "out")
    assert report.resumed > 0
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")
    assert not (tmp_path / "out.part").exists()
    assert again(model, tmp_path / "out").complete_already
    with pytest.raises(HotsetError, match="exists: choose another name"):
        again(model, tmp_path / "out", by="ean")


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from hotset.analysis import prune_writer
from test_prune_crash import again
left = [int(sys.argv[4])]
def write(handle, data):
    left[0] -= 1
    if not left[0]:
        os.write(handle, data[:len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    return os.write(handle, data)
prune_writer._write = write
again(Path(sys.argv[3]), Path(sys.argv[3]).with_name("out"))
"""


def test_a_killed_prune_is_finished_byte_for_byte(model: Path, tmp_path: Path) -> None:
    here = Path(__file__).parent
    words = [sys.executable, "-c", KILLED, str(here), str(here.parent / "families"), str(model), "60"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    assert not (tmp_path / "out").exists()
    damaged = next(file for file in sorted((tmp_path / "out.part").glob("*.safetensors")))
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"\0\1\2\3")  # what the journal says is believed once it was read
    report = again(model, tmp_path / "out")
    assert report.resumed > 0
    again(model, tmp_path / "undisturbed")
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def test_an_interrupt_in_the_run_over_text_costs_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saliency_runs, "PASS_TOKENS", 256)
    text, told = tmp_path / "text.txt", []
    text.write_text("\n\n".join(one.text for one in reference.workload("de").prompts[:8]), encoding="utf-8")

    @contextmanager
    def bar(what: str) -> Iterator[Any]:
        def tell(done: int, total: int) -> None:
            told.append((what, done, total))
            if len(told) == 1:
                raise KeyboardInterrupt

        yield tell

    options = RunOptions(device="cpu", memory="50%")
    workload = TextFiles((text,), 512)
    pruner = Pruner(str(reference.path()), tmp_path / "out", "reap", "75%", options, workload)
    with tiny.quiet():
        with pytest.raises(KeyboardInterrupt):
            pruner.prune(bar)
        assert (tmp_path / "out.part" / "saliency.safetensors").exists()
        report = pruner.prune(bar)
        assert [one for one in told if one[0] == "recording saliency"] == [
            ("recording saliency", 1, 2), ("recording saliency", 2, 2),
        ]  # fmt: skip
        assert told[-1][1] == told[-1][2]
        whole = record_saliency(str(reference.path()), workload, options)
    assert report.kept == choose(whole.scores("reap"), 48, RouterRules(64, 8), whole.super_experts())
    assert not (tmp_path / "out" / "saliency.safetensors").exists()


def test_files_of_another_choice_are_written_again(model: Path, tmp_path: Path) -> None:
    """A saliency that was recorded anew may choose otherwise than the one by which a killed run began to write."""
    again(model, tmp_path / "out")
    folder = prune_writer.PruneFolder(tmp_path / "other", {"owner": "me"})
    with folder:
        folder.choose(b"one")
        (folder.folder / "a.safetensors").write_bytes(b"weights")
        folder.journal.add_file("a.safetensors", prune_writer.file_digest(folder.folder / "a.safetensors"))
    with prune_writer.PruneFolder(tmp_path / "other", {"owner": "me"}) as folder:
        folder.choose(b"one")
        assert folder._is_there("a.safetensors")
        folder.choose(b"two")
    with prune_writer.PruneFolder(tmp_path / "other", {"owner": "me"}) as folder:
        assert not folder._is_there("a.safetensors")


def test_places_that_cannot_be_written(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HotsetError, match="cannot write"):
        again(model, tmp_path / "file" / "out")
    with pytest.raises(HotsetError, match="exists: choose another name"):
        again(model, tmp_path / "file")
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "mine.txt").write_text("mine")
    with pytest.raises(HotsetError, match="no unfinished model"):
        again(model, tmp_path / "out")
    few = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: few)
    with pytest.raises(HotsetError, match="too full"):
        again(model, tmp_path / "elsewhere")
