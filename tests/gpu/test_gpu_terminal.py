"""hotset at a terminal of a machine with a GPU, with Ctrl-C in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpu_commands import CANCEL_TIMEOUT_S, PROMPT, UNTUNED, Terminal  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


def test_a_chat_at_a_terminal_goes_on_after_ctrl_c(folder: Path, stock: Any) -> None:
    words = ("--memory", "25%", "--dtype", "float32")
    terminal = Terminal("chat", folder, *words, "--max-new-tokens", 2000)
    terminal.wait_for("> ")
    terminal.type(f"{PROMPT}\n")
    first = stock(PROMPT)
    terminal.wait_for(first[:20])  # the answer has begun
    os.kill(terminal.child, signal.SIGINT)
    terminal.wait_for("\n> ", after=len(terminal.text) - 40)
    terminal.type("/reset\n")
    terminal.wait_for("> ", after=len(terminal.text))
    at = len(terminal.text)
    terminal.type(f"{PROMPT}\n")
    terminal.wait_for(first, after=at)  # what stock says, from its first word on
    os.kill(terminal.child, signal.SIGINT)
    terminal.wait_for("\n> ", after=len(terminal.text) - 40)
    terminal.type("/exit\n")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text


def test_ctrl_c_in_the_middle_of_a_run_ends_in_order(folder: Path) -> None:
    for wait in (b"", b"x"):  # while it loads or reads the prompt, and once text has come
        command = [sys.executable, "-W", "ignore", "-m", "hotset", "run", str(folder), "--memory", "25%", "-p", PROMPT]
        child = subprocess.Popen(
            [*command, "--max-new-tokens", "3000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=os.environ | UNTUNED,
        )
        assert child.stdout is not None
        assert child.stderr is not None
        if wait:
            child.stdout.read(1)
        else:
            time.sleep(4)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=CANCEL_TIMEOUT_S)
        ended = (130,) if wait else (130, -signal.SIGINT)  # before hotset runs, the interpreter ends by the signal
        assert child.returncode in ended, errors
        assert b"Traceback" not in errors
