"""The commands of hotset as processes, a terminal for them, and what stock transformers answers."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

PROMPT = "La storia della città di Roma"
TOKENS = 48
WIDTH = 1024
"""Of the experts: 400 MB of them, so that it takes a moment to read them all."""
CANCEL_TIMEOUT_S = 180.0
UNTUNED = {"HOTSET_TUNE": "0"}
"""The first choice for every kernel: to compile and time them all takes a minute in every new process."""


def hotset(*words: Any, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command of hotset as a process."""
    command = [sys.executable, "-W", "ignore", "-m", "hotset", *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=CANCEL_TIMEOUT_S, check=False, env=os.environ | UNTUNED
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def run(folder: Path, *words: Any) -> dict[str, Any]:
    words = ("run", folder, "-p", PROMPT, "--dtype", "float32", "--max-new-tokens", TOKENS, "--json", *words)
    found: dict[str, Any] = json.loads(hotset(*words).stdout)
    return found


class Terminal:
    """A command of hotset at a terminal of its own."""

    def __init__(self, *words: Any) -> None:
        self.child, self.screen = pty.fork()
        if not self.child:
            os.environ.update(UNTUNED, TERM="dumb")
            os.execv(sys.executable, [sys.executable, "-W", "ignore", "-m", "hotset", *map(str, words)])  # noqa: S606
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode())

    def wait_for(self, wanted: str, after: int = 0) -> None:
        """Read until something has appeared on the screen behind a place."""
        deadline = time.monotonic() + CANCEL_TIMEOUT_S
        while wanted not in self.text[after:]:
            assert time.monotonic() < deadline, f"no {wanted!r} in {self.text!r}"
            ready, _, _ = select.select([self.screen], [], [], 1.0)
            if ready:
                try:
                    self.text += os.read(self.screen, 1 << 16).decode(errors="replace").replace("\r\n", "\n")
                except OSError:
                    pytest.fail(f"it ended without {wanted!r}: {self.text!r}")

    def end(self) -> int:
        """The exit code, once all that is left to say was said."""
        while True:
            try:
                if not os.read(self.screen, 1 << 16):
                    break
            except OSError:
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])
