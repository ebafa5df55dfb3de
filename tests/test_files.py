"""Files are written beside and renamed: what was there stays until the new one is whole."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hotset.errors import HotsetError
from hotset.files import write_beside
from hotset.profile import Fingerprint


def test_success_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "t"
    target.write_text("old")
    with write_beside(target) as scratch:
        scratch.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_failure_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "t"
    target.write_text("old")
    with pytest.raises(ZeroDivisionError), write_beside(target) as scratch:
        scratch.write_text(str(1 // 0))
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(HotsetError, match="free some space"), write_beside(tmp_path / "t"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


def test_no_folder_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(HotsetError, match="does the folder exist"), write_beside(tmp_path / "no" / "t"):
        pass


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_file_that_is_written_again_keeps_its_mode(mode: int, tmp_path: Path) -> None:
    target = tmp_path / "t"
    target.write_text("old")
    target.chmod(mode)
    with write_beside(target) as scratch:
        scratch.write_text("new")
        assert scratch.parent.stat().st_mode & 0o777 == 0o700, "nobody else may look at it before it is in place"
    assert target.stat().st_mode & 0o777 == mode


def test_a_new_file_has_the_mode_that_the_system_gives(tmp_path: Path) -> None:
    with write_beside(tmp_path / "t") as scratch:
        scratch.write_text("new")
    (tmp_path / "other").write_text("plain")
    assert (tmp_path / "t").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_private_profile_and_a_private_trace_stay_private(tmp_path: Path) -> None:
    from hotset.profile.fold import profile_of
    from hotset.trace.synth import SynthConfig, synthesise

    trace = synthesise(SynthConfig(layers=2, experts=8, top_k=2, requests=2))
    for work in (trace, profile_of(trace, Fingerprint("made-up", "0" * 32))):
        target = tmp_path / "t.safetensors"
        work.save(target)
        target.chmod(0o600)
        work.save(target)
        assert target.stat().st_mode & 0o777 == 0o600
        target.unlink()


@pytest.mark.parametrize("name", ["x" * 250, "ü" * 120])
def test_long_names_can_be_written(name: str, tmp_path: Path) -> None:
    with write_beside(tmp_path / name) as scratch:
        scratch.write_text("new")
    assert [file.name for file in tmp_path.iterdir()] == [name]


HOLD = """
import sys, time
from pathlib import Path
from hotset.files import write_beside
with write_beside(Path(sys.argv[1])) as scratch:
    scratch.write_text("half")
    (scratch.parent / "of-a-library").write_text("temporary")
    print("writing", flush=True)
    sys.stdin.readline()
print("written", flush=True)
"""


def test_the_next_writer_removes_what_killed_ones_left_and_disturbs_no_living_one(tmp_path: Path) -> None:
    def begin(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, str(tmp_path / name)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        return process

    killed, living = begin("t"), begin("t")
    with killed:
        killed.kill()
    assert len(list(tmp_path.iterdir())) == 2
    with write_beside(tmp_path / "other") as scratch:
        scratch.write_text("new")
    assert len([file for file in tmp_path.iterdir() if file.name.endswith(".part")]) == 1
    assert living.communicate("\n")[0] == "written\n"
    assert (tmp_path / "t").read_text() == "half"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other", "t"]


def test_left_over_files_of_earlier_versions_go_once_they_are_old(tmp_path: Path) -> None:
    names = (".t.abcd1234.part", ".t.fresh123.part", ".other.abcd1234.part", ".t.not-ours.part")
    for name in names:
        (tmp_path / name).write_text("half")
        if "fresh" not in name:
            os.utime(tmp_path / name, (1e9, 1e9))
    with write_beside(tmp_path / "t") as scratch:
        scratch.write_text("new")
    assert {file.name for file in tmp_path.iterdir()} == {"t", *names[1:]}


def test_a_link_that_looks_left_over_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "thesis").write_text("years of work")
    (tmp_path / ".t.hotset-abcd1234.part").symlink_to(tmp_path / "kept")
    with write_beside(tmp_path / "t") as scratch:
        scratch.write_text("new")
    assert (tmp_path / "kept" / "thesis").read_text() == "years of work"


SAVE = """
import numpy as np, signal, sys
from hotset.trace.synth import SynthConfig, synthesise
trace = synthesise(SynthConfig(layers=8, experts=32, top_k=4, requests=16))
print("ready", flush=True)
trace.save(sys.argv[1])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs a file size limit")
def test_a_real_write_that_runs_out_of_room_leaves_the_old_trace(tmp_path: Path) -> None:
    target = tmp_path / "t.safetensors"
    target.write_text("old")
    code = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}  # the limit must hit the trace, not Numba's cache
    done = subprocess.run(
        [sys.executable, "-c", code + SAVE, str(target)], capture_output=True, text=True, check=False, env=environment
    )
    assert "HotsetError" in done.stderr, done.stderr
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_killed_writer_leaves_the_old_trace(tmp_path: Path) -> None:
    target = tmp_path / "t.safetensors"
    target.write_text("old")
    code = SAVE.replace("trace.save(sys.argv[1])", "import hotset.files, os, time\n") + (
        "os.replace = lambda *a: (print('written', flush=True), time.sleep(60))\ntrace.save(sys.argv[1])"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert process.stdout.readline() == "written\n"
        process.kill()
    assert target.read_text() == "old"
