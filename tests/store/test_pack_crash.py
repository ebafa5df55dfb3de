"""A pack that is killed, starved of space or left to a bad disk is finished later, byte for byte as if nothing was."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from store_samples import blocks, content, plan_of, write_pack

from hotset.errors import HotsetError, StoreError
from hotset.store import pack
from hotset.store.journal import JOURNAL_FILE
from hotset.store.pack import Packer, part_folder
from hotset.store.packed import BLOCKS_FILE, open_packed
from hotset.store.plan import PackKey
from hotset.store.verify import verify_packed

HERE = Path(__file__).parent

SLOW = f"""
import sys, time
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from store_samples import plan_of, blocks
from hotset.store import pack
pack.COMMIT_BYTES = 20_000
plan = plan_of((30, 30))
print("ready", flush=True)
def slowly(found):
    for each in found:
        time.sleep(0.003)
        yield each
with pack.Packer(Path(sys.argv[1]), plan, file_bytes=13) as packer:
    packer.add_file("model.safetensors", [b"dense weights"])
    packer.add_all(slowly(blocks(plan, packer.missing())))
    packer.finish()
"""


def test_killed_at_random_times_it_is_finished_all_the_same(tmp_path: Path) -> None:
    write_pack(tmp_path / "undisturbed", plan_of((30, 30)))
    out, dice, kills = tmp_path / "pack", random.Random(), 0  # noqa: S311
    while not out.exists():
        with subprocess.Popen([sys.executable, "-c", SLOW, str(out)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(dice.uniform(0, 0.12))
            if kills < 6:
                process.kill()
                kills += 1
            assert process.wait(60) in (0, -9)
    pack.tidy(out)
    assert kills >= 1
    assert content(out) == content(tmp_path / "undisturbed")


def test_killed_at_every_system_call_it_is_finished_all_the_same(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, HERE / "crash_points.py", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


def begin(out: Path, count: int = 6) -> Packer:
    """A pack of twelve experts with some of them written."""
    packer = Packer(out, plan_of())
    packer.add_all(blocks(packer.plan, packer.missing()[:count]))
    return packer


@pytest.fixture
def undisturbed(tmp_path: Path) -> dict[str, bytes]:
    with begin(tmp_path / "undisturbed", 12) as packer:
        packer.finish()
    return content(tmp_path / "undisturbed")


def go_on(out: Path) -> int:
    """Finish a pack; the number of experts that it took over."""
    with Packer(out, plan_of()) as packer:
        missing = packer.missing()
        packer.add_all(blocks(packer.plan, missing))
        packer.finish()
    return 12 - len(missing)


def test_what_was_committed_is_not_written_again(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    begin(tmp_path / "pack").close()
    assert go_on(tmp_path / "pack") == 6
    assert content(tmp_path / "pack") == undisturbed


def test_a_block_that_the_disk_lost_is_written_again(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    begin(tmp_path / "pack").close()
    with (part_folder(tmp_path / "pack") / BLOCKS_FILE).open("r+b") as file:
        file.seek(2 * 4096 + 5)
        file.write(b"\0\0\0\0\0\0\0\0")
    assert go_on(tmp_path / "pack") == 5
    assert content(tmp_path / "pack") == undisturbed


@pytest.mark.parametrize(
    "tail", [b'[1, 3, "00', b"\0" * 40, b"[1, 2]\n", b'[99, 99, "00"]\n', b'["x", 1, "zz"]\n', b"[" * 9999 + b"\n"]
)
def test_a_torn_or_garbled_journal_is_believed_up_to_there(
    tmp_path: Path, undisturbed: dict[str, bytes], tail: bytes
) -> None:
    begin(tmp_path / "pack").close()
    with (part_folder(tmp_path / "pack") / JOURNAL_FILE).open("ab") as file:
        file.write(tail)
    assert go_on(tmp_path / "pack") == 6
    assert content(tmp_path / "pack") == undisturbed


def test_a_lost_file_of_blocks_costs_the_work_and_nothing_else(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    begin(tmp_path / "pack").close()
    (part_folder(tmp_path / "pack") / BLOCKS_FILE).unlink()
    assert go_on(tmp_path / "pack") == 0
    assert content(tmp_path / "pack") == undisturbed


@pytest.mark.parametrize(("key", "value"), [("model", "another"), ("dtype", "float32"), ("fingerprint", "e" * 32)])
def test_an_unfinished_pack_of_something_else_is_refused_by_name(tmp_path: Path, key: str, value: str) -> None:
    begin(tmp_path / "pack").close()
    before = content(tmp_path)
    with pytest.raises(StoreError, match=rf"pack\.part is an unfinished pack with another {key} .*remove"):
        Packer(tmp_path / "pack", plan_of(**{key: value}))
    assert content(tmp_path) == before


def test_another_layout_is_another_pack(tmp_path: Path) -> None:
    begin(tmp_path / "pack").close()
    with pytest.raises(StoreError, match="another layout"):
        Packer(tmp_path / "pack", plan_of((5, 8)))


def test_a_folder_that_is_no_pack_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pack.part").mkdir()
    (tmp_path / "pack.part" / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreError, match="is no unfinished pack"):
        Packer(tmp_path / "pack", plan_of())
    assert content(tmp_path) == {"pack.part/thesis.txt": b"years of work"}


def test_two_at_once_are_one_too_many(tmp_path: Path) -> None:
    with begin(tmp_path / "pack"), pytest.raises(StoreError, match="another hotset is writing"):
        Packer(tmp_path / "pack", plan_of())


def test_an_incomplete_pack_gets_no_name(tmp_path: Path) -> None:
    with begin(tmp_path / "pack") as packer, pytest.raises(StoreError, match="and 5 more were never written"):
        packer.finish()
    assert not (tmp_path / "pack").exists()


def test_a_disk_that_forgets_is_found_out_before_the_pack_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def forgetful(handle: int, data: memoryview, offset: int) -> int:
        return real(handle, bytes(len(data)), offset) if offset == 4096 else real(handle, data, offset)

    monkeypatch.setattr(pack, "_pwrite", forgetful)
    with begin(tmp_path / "pack", 12) as packer, pytest.raises(StoreError, match=r"expert 1 .*does not read back"):
        packer.finish()
    monkeypatch.undo()
    assert go_on(tmp_path / "pack") == 11
    verify_packed(tmp_path / "pack")


def test_short_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, bytes]) -> None:
    monkeypatch.setattr(pack, "_pwrite", lambda handle, data, offset: os.pwrite(handle, data[:1000], offset))
    assert go_on(tmp_path / "pack") == 0
    assert content(tmp_path / "pack") == undisturbed


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(HotsetError, match=r"needs 1,1\d\d,\d\d\d bytes more and 5,000 are free; free some space"):
        Packer(tmp_path / "pack", plan_of())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_keeps_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, bytes], code: int
) -> None:
    def full(handle: int, data: memoryview, offset: int) -> int:
        if offset >= 7 * 4096:
            raise OSError(code, os.strerror(code))
        return os.pwrite(handle, data, offset)

    monkeypatch.setattr(pack, "_pwrite", full)
    with pytest.raises(
        HotsetError, match=r"is full: the pack needs [\d,]+ bytes more and [\d,]+ are free; .*same command"
    ):
        go_on(tmp_path / "pack")
    monkeypatch.undo()
    assert go_on(tmp_path / "pack") == 6
    assert content(tmp_path / "pack") == undisturbed


def test_a_disk_that_fills_up_under_another_file_is_the_same_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with begin(tmp_path / "pack") as packer:
        monkeypatch.setattr(pack, "_pwrite", full)
        with pytest.raises(HotsetError, match="is full: the pack needs"):
            packer.add_file("model.safetensors", [b"some", b"thing"])
        monkeypatch.undo()
        packer.add_file("model.safetensors", [b"some", b"thing"])
        assert (packer.folder / "model.safetensors").read_bytes() == b"something"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of two megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "hotset-test", str(place)]
    if os.name != "posix" or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_real_disk_that_fills_up_in_the_middle(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of((100, 200))  # 400 kB and 1.6 MB
    write_pack(tmp_path / "undisturbed", plan)
    hog = small_disk / "hog"
    with pytest.raises(
        HotsetError, match=r"is too full: the pack needs 3,\d{3},\d{3} bytes more and 2,0\d\d,\d{3} are free"
    ):
        write_pack(small_disk / "pack", plan)
    monkeypatch.setattr(
        pack.PackFolder, "_check_room", lambda _: None
    )  # there was room at the start, and then others wrote
    hog.write_bytes(bytes(700_000))
    with pytest.raises(HotsetError, match=r"is full: the pack needs [\d,]+ bytes more and [\d,]+ are free"):
        write_pack(small_disk / "pack", plan)
    hog.unlink()
    with Packer(small_disk / "pack", plan, file_bytes=13) as packer:
        assert 0 < len(packer.missing()) < 300, "nothing was kept of what had been written"
        packer.add_file("model.safetensors", [b"dense weights"])
        packer.add_all(blocks(plan, packer.missing()))
        packer.finish()
    assert content(small_disk / "pack") == content(tmp_path / "undisturbed")


@pytest.mark.parametrize("key", [PackKey(0, 0), PackKey(1, 3)])
def test_a_flipped_bit_is_found_and_named(tmp_path: Path, key: PackKey) -> None:
    plan = write_pack(tmp_path / "pack")
    with (tmp_path / "pack" / BLOCKS_FILE).open("r+b") as file:
        at = plan.offset(key) + 10
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    name = rf"layer {key.layer} \(model\.layers\.{key.layer}\.experts\), expert {key.expert} in .*experts\.hotset"
    with pytest.raises(StoreError, match=f"damaged: {name} .*pack the model again"):
        verify_packed(tmp_path / "pack")


def test_damage_in_another_file_and_in_many_blocks_is_counted(tmp_path: Path) -> None:
    write_pack(tmp_path / "pack")
    assert verify_packed(tmp_path / "pack").experts == 12
    (tmp_path / "pack" / "model.safetensors").write_bytes(b"dense_weights")
    with pytest.raises(StoreError, match=r"damaged: .*pack/model\.safetensors; pack"):
        verify_packed(tmp_path / "pack")
    size = (tmp_path / "pack" / BLOCKS_FILE).stat().st_size
    (tmp_path / "pack" / BLOCKS_FILE).write_bytes(bytes(size))
    with pytest.raises(StoreError, match=r"and 10 more"):
        verify_packed(tmp_path / "pack")


def test_progress_grows_to_all_bytes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    plan = plan_of()
    with Packer(tmp_path / "pack", plan, file_bytes=5, progress=lambda *now: seen.append(now)) as packer:
        packer.add_file("model.safetensors", [b"12", b"345"])
        packer.add_all(blocks(plan, packer.missing()))
        packer.finish()
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == packer.meter.total_bytes


def test_a_pack_for_one_process_is_neither_flushed_nor_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("a spill need not outlive the process"))
    monkeypatch.setattr(pack, "write_beside", plain_write)
    plan = plan_of()
    with Packer(tmp_path / "spill", plan, durable=False) as packer:
        packer.add_all(blocks(plan, packer.missing()))
        packer.finish()
    catalog = open_packed(tmp_path / "spill")
    assert np.shape(catalog.digests[0] if catalog.digests else ()) == (5,)
    assert json.loads((tmp_path / "spill" / "experts.json").read_text())["source"]["model"] == "made-up"


def plain_write(path: Path) -> object:
    from contextlib import nullcontext

    return nullcontext(path)


def test_the_journal_names_a_block_only_once_it_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    write, flush = os.pwrite, os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append(("flush", handle)), flush(handle)))
    monkeypatch.setattr(os, "pwrite", lambda h, data, at: (calls.append(("journal", h)), write(h, data, at))[1])
    monkeypatch.setattr(pack, "_pwrite", lambda h, data, at: (calls.append(("block", h)), write(h, data, at))[1])
    with begin(tmp_path / "pack", 3) as packer:
        blocks_handle, journal_handle = packer._disk.blocks, packer.journal._handle
    assert calls[-6:] == [
        ("block", blocks_handle),
        ("block", blocks_handle),
        ("block", blocks_handle),
        ("flush", blocks_handle),
        ("journal", journal_handle),
        ("flush", journal_handle),
    ]
