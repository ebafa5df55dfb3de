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
