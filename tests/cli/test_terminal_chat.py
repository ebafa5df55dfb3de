"""`hotset chat` at a terminal: blocks, Ctrl-C, SIGTERM, another size of the window, and bytes that are no text."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calls import call, model_folder

from hotset.profile import Profile

pytestmark = pytest.mark.filterwarnings("default")

CANCEL_TIMEOUT_S = 200.0  # to fail at last, not to measure
PRESS_AGAIN_S = 20.0
PROMPT = "Il mercato del"
LONG = ("--memory", "25%", "--max-new-tokens", "3000")


class Terminal:
    """A command of hotset at a terminal of its own."""

    def __init__(self, *words: Any, term: str = "dumb") -> None:
        self.text = ""
        self.ended = False
        self.child, self.screen = pty.fork()
        if not self.child:
            os.environ.update(TERM=term, COLUMNS="200")
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # as at any terminal; scripts ignore it for what they start
            os.execv(sys.executable, [sys.executable, "-W", "ignore", "-m", "hotset", *map(str, words)])  # noqa: S606

    def type(self, data: bytes) -> int:
        """Type; returns how much was on the screen before."""
        before = len(self.text)
        os.write(self.screen, data)
        return before

    def press_ctrl_c(self, wanted: str) -> None:
        """As a person does, once it waits for a key, and again where nothing happens, until a pattern is there."""
        self.settle()
        at, start = self.type(b"\x03"), time.monotonic()
        again = start + PRESS_AGAIN_S
        while not re.search(wanted, self.text[at:]):
            now = time.monotonic()
            assert now < start + CANCEL_TIMEOUT_S, f"no {wanted!r} in {self.text!r}"
            if now > again and len(self.text) == at:
                self.type(b"\x03")
                again = now + PRESS_AGAIN_S
            assert self._read(), f"it ended without {wanted!r}: {self.text!r}"

    def settle(self) -> None:
        """Wait until it waits: Python's readline overlooks a signal between two reads."""
        deadline, still, last = time.monotonic() + CANCEL_TIMEOUT_S, 0, None
        while still < 5:
            assert time.monotonic() < deadline, self.text
            words = Path(f"/proc/{self.child}/stat").read_text().rpartition(")")[2].split()
            still = still + 1 if words[0] == "S" and words[11:13] == last else 0
            last = words[11:13]  # its processor time
            time.sleep(0.1)

    def resize(self, rows: int, columns: int) -> None:
        """Make the window another size, as a person does."""
        fcntl.ioctl(self.screen, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

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
    terminal.wait_for("a new conversation: all turns before are forgotten\n(.*\n)?> $", at)
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


def test_an_error_of_the_model_leaves_the_conversation_open_until_sigterm(
    terminals: list[Terminal], tmp_path: Path
) -> None:
    place = model_folder(tmp_path / "model", config={"max_position_embeddings": 40})
    (place / "chat_template.jinja").write_text(
        "{% if 'x' in messages[-1].content %}{{ raise_exception('\x1b[2Jno x') }}{% endif %}{{ messages[-1].content }}"
    )
    learnt = tmp_path / "p.safetensors"
    terminal = Terminal("chat", place, "--memory", "25%", "--max-new-tokens", "4", "--learn", learnt)
    terminals.append(terminal)
    terminal.wait_for("> $")
    at = terminal.type(b"xxx\n")
    terminal.wait_for(r"error: the chat template does not work .*\?\[2Jno x(.|\n)*> $", at)
    at = terminal.type(b"una parola " * 40 + b"\n")
    terminal.wait_for("error: the prompt has (.|\n)*> $", at)
    at = terminal.type(f"{PROMPT}\n".encode())
    terminal.wait_for(r"del\n(.|\n)+\n> $", at)
    terminal.settle()
    os.kill(terminal.child, signal.SIGTERM)  # while it waits at the prompt
    assert terminal.end() == 143
    assert "Traceback" not in terminal.text
    assert Profile.load(learnt).tokens.sum() > 3


def test_blocks_ctrl_c_a_new_size_and_other_alphabets(terminals: list[Terminal], tmp_path: Path) -> None:
    """A terminal as people have it: with escape codes, so that pasted text is marked as such."""
    place = model_folder(tmp_path / "model")
    # The model is told how many lines the last message has, and the error that shows it ends the turn at once.
    template = "{{ raise_exception('lines=' ~ messages[-1].content.split('\n')|length ~ ' ' ~ messages[-1].content) }}"
    (place / "chat_template.jinja").write_text(template)
    terminal = Terminal("chat", place, "--memory", "25", term="xterm")
    terminals.append(terminal)
    terminal.wait_for("25 %, or 25 bytes")
    terminal.type(b"what?\n")
    terminal.wait_for("25 %, or 25 bytes(.|\n)*25 %, or 25 bytes")
    terminal.type(b"%\n")
    terminal.wait_for(r"model: .* of memory for experts, policy blend; greedy\. (.|\n)*> ")
    at = terminal.type(b"\x1b[200~def f():\r    return 1\r\rprint(f())\x1b[201~\n")  # pasted, then Enter
    terminal.wait_for("lines=4 def f(.|\n)*> ", at)
    at = terminal.type(b'\x1b[200~"""Words."""\rdef f():\r    """More.\x1b[201~\n')  # its own quotes open nothing
    terminal.wait_for('lines=3 """Words."""(.|\n)*> ', at)
    at = terminal.type('"""perché\nил\n中文"""\n'.encode())
    terminal.wait_for("lines=3 perché ил 中文(.|\n)*> ", at)
    terminal.resize(30, 40)
    at = terminal.type(b"h")
    terminal.wait_for("h", at)  # the line is drawn anew at the first key after a resize
    at = terminal.type(b"alf a question that is longer than the new line")
    terminal.wait_for("line", at)
    at = terminal.type(b"\x01")  # to its beginning: a line up, since there are two now
    terminal.wait_for(r"\x1b\[A", at)
    terminal.press_ctrl_c("\n.*> ")
    at = terminal.type("ночь 🌙\n".encode())  # and nothing of the line before
    terminal.wait_for("lines=1 ночь 🌙(.|\n)*> ", at)
    at = terminal.type(b'"""one\ntwo')
    terminal.wait_for("two", at)
    terminal.press_ctrl_c("> ")
    at = terminal.type(b"three\n")
    terminal.wait_for("lines=1 three(.|\n)*> ", at)
    terminal.press_ctrl_c("Ctrl-C again, Ctrl-D or /bye ends the chat(.|\n)*> ")
    at = terminal.type(b"still here\n")
    terminal.wait_for("lines=1 still here(.|\n)*> ", at)
    terminal.press_ctrl_c("Ctrl-C again(.|\n)*> ")
    terminal.press_ctrl_c("\n")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text


def test_sigterm_in_an_answer_ends_the_chat(terminals: list[Terminal]) -> None:
    terminal = Terminal("chat", *LONG)
    terminals.append(terminal)
    terminal.wait_for("> $")
    at = terminal.type(f"{PROMPT}\n".encode())
    terminal.wait_for(r"\n.{20}", at)  # the answer has begun
    terminal.resize(50, 60)
    os.kill(terminal.child, signal.SIGTERM)
    assert terminal.end() == 143
    assert "of experts in memory" in terminal.text[at:]
    assert "Traceback" not in terminal.text
