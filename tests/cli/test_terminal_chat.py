"""`hotset chat` at a terminal: Ctrl-C in the middle of an answer, the next question, bytes that are no text."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calls import call, model_folder

pytestmark = pytest.mark.filterwarnings("default")

CANCEL_TIMEOUT_S = 200.0  # to fail at last, not to measure
PROMPT = "Il mercato del"
LONG = ("--memory", "25%", "--max-new-tokens", "3000")


class Terminal:
    """A command of hotset at a terminal of its own."""

    def __init__(self, *words: Any) -> None:
        self.text = ""
        self.ended = False
        self.child, self.screen = pty.fork()
        if not self.child:
            os.environ.update(TERM="dumb", COLUMNS="200")
            os.execv(sys.executable, [sys.executable, "-W", "ignore", "-m", "hotset", *map(str, words)])  # noqa: S606

    def type(self, data: bytes) -> int:
        """Type; returns how much was on the screen before."""
        before = len(self.text)
        os.write(self.screen, data)
        return before

    def wait_for(self, wanted: str, after: int = 0) -> str:
        """Read until a pattern is on the screen behind a place."""
        deadline = time.monotonic() + CANCEL_TIMEOUT_S
        while not (found := re.search(wanted, self.text[after:])):
            assert time.monotonic() < deadline, f"no {wanted!r} in {self.text!r}"
            assert self._read(), f"it ended without {wanted!r}: {self.text!r}"
        return found[0]

    def end(self) -> int:
        """The exit code, once all that is left to say was said."""
        deadline = time.monotonic() + CANCEL_TIMEOUT_S
        while self._read():
            assert time.monotonic() < deadline, self.text
        self.ended = True
        return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])

    def close(self) -> None:
        """Leave nothing behind."""
        if not self.ended:
            os.kill(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)
        os.close(self.screen)

    def _read(self) -> bool:
        """Take what is there; false at the end."""
        if select.select([self.screen], [], [], 1.0)[0]:
            try:
                data = os.read(self.screen, 1 << 16)
            except OSError:  # how Linux says that the other side is gone
                return False
            self.text += data.decode(errors="replace").replace("\r\n", "\n")
            return bool(data)
        return True


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    made: list[Terminal] = []
    yield made
    for terminal in made:
        terminal.close()


def test_ctrl_c_ends_an_answer_and_the_next_question_is_answered(terminals: list[Terminal]) -> None:
    terminal = Terminal("chat", *LONG)
    terminals.append(terminal)
    terminal.wait_for("> $")
    at = terminal.type(f"{PROMPT}\n".encode())
    whole = call("run", "-p", PROMPT, "--memory", "25%", "--max-new-tokens", "30").out
    terminal.wait_for(re.escape(whole[:40]), at)  # the answer has begun
    terminal.type(b"\x03")  # to all processes of the terminal
    terminal.wait_for(r"\n> $", at)
    at = terminal.type(b"ciao\xff\xfe\n")  # what a terminal of another encoding sends
    terminal.wait_for("error: .*UTF-8(.|\n)*> $", at)
    at = terminal.type(b"/reset\n")
    terminal.wait_for("reset\n(.*\n)?> $", at)
    at = terminal.type(f"{PROMPT}\n".encode())
    terminal.wait_for(re.escape(whole[:40]), at)
    os.kill(terminal.child, signal.SIGINT)
    terminal.wait_for(r"\n> $", at)
    at = terminal.type(b"/stats\n")
    terminal.wait_for("of experts in memory(.|\n)*> $", at)
    terminal.type(b"\x04")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text
    assert "of experts in memory" in terminal.text[at + 200 :]


def test_an_error_of_the_model_leaves_the_conversation_open(terminals: list[Terminal], tmp_path: Path) -> None:
    place = model_folder(tmp_path / "model", config={"max_position_embeddings": 40})
    (place / "chat_template.jinja").write_text(
        "{% if 'x' in messages[-1].content %}{{ raise_exception('\x1b[2Jno x') }}{% endif %}{{ messages[-1].content }}"
    )
    terminal = Terminal("chat", place, "--memory", "25%", "--max-new-tokens", "4")
    terminals.append(terminal)
    terminal.wait_for("> $")
    at = terminal.type(b"xxx\n")
    terminal.wait_for(r"error: the chat template does not work .*\?\[2Jno x(.|\n)*> $", at)
    at = terminal.type(b"una parola " * 40 + b"\n")
    terminal.wait_for("error: the prompt has (.|\n)*> $", at)
    at = terminal.type(f"{PROMPT}\n".encode())
    terminal.wait_for(r"del\n(.|\n)+\n> $", at)
    terminal.type(b"/exit\n")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text
