"""A recording that is killed leaves nothing half written in its place, and --force goes over what lies beside."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from calls import call

pytest.importorskip("torch")
pytest.importorskip("transformers")


pytestmark = pytest.mark.filterwarnings("default")


def test_sigkill_leaves_no_trace_and_the_next_run_is_whole(tmp_path: Path) -> None:
    """While it begins; tests/cli/test_signals.py kills one that has recorded something."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Il mare\nint main\n" * 200)
    out = tmp_path / "t.safetensors"
    words = ["trace", "record", "--prompts", str(prompts), "-o", str(out)]
    command = [sys.executable, "-m", "hotset", *words, "--max-new-tokens", "32"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        time.sleep(1.5)
        process.send_signal(signal.SIGKILL)
    assert not out.exists()
    assert call(*words, "--max-new-tokens", "2", "--limit", "2", "--force").code == 0
    from hotset import Trace

    assert Trace.load(out).requests == 2
