"""`hotset chat`: a conversation, at a terminal or through a pipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

from hotset.cli import run_options as opt
from hotset.cli.interrupts import exit_code, is_terminated, stop_on_signals
from hotset.cli.live import with_options
from hotset.cli.output import JsonFlag, aside, emit, finish_text, show
from hotset.errors import HotsetError
from hotset.generation.sampling import Sampling
from hotset.options import RunOptions

if TYPE_CHECKING:
    from hotset.generation import Answer, Conversation

_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.+))?")
_HELP = """/stats: what it cost   /stats LAYER or all: what is hot   /reset: forget all turns   /exit or Ctrl-D: end
/pins: what is pinned   /pin 20%: pin the hottest   /unpin: unpin all   /plot FILE: draw it   /mark NAME: name a moment
Ctrl-C stops an answer"""


@with_options
def chat(
    options: RunOptions,
    sampling: Sampling = Sampling(max_new_tokens=512),
    use_template: opt.UseTemplate = None,
    as_json: JsonFlag = False,
) -> None:
    """Talk with a model; through a pipe every line is a turn.

    Example: hotset chat ./Qwen3-30B-A3B --memory 25% --learn italian-chat
    """
    from hotset.cli.loading import loaded_model
    from hotset.generation import Conversation

    with loaded_model(options) as text_model:
        session = ChatSession(Conversation(text_model, sampling, use_template), as_json)
        try:
            for line in _lines():
                if not session.take(line.strip()):
                    break
        except HotsetError:
            session.end()  # the turns before are not lost
            raise
        session.end()


class ChatSession:
    """Takes line after line, and keeps what came of them."""

    def __init__(self, conversation: Conversation, as_json: bool) -> None:
        self.conversation, self.as_json = conversation, as_json
        self.piped = not sys.stdin.isatty()
        self.turns: list[dict[str, Any]] = []
        self.answers: list[Answer] = []

    def take(self, line: str) -> bool:
        """Answer a turn or run a command; false to end."""
        if line in ("/exit", "/quit"):
            return False
        if command := _COMMAND.fullmatch(line):
            self._run_command(command[1], command[2] or "")
        elif line:
            self._answer(line)
        return not self._stopped()

    def _stopped(self) -> bool:
        """Whether the session is over: SIGTERM ends it, and Ctrl-C at a pipe, which has no one to go on."""
        from hotset.generation import Finish

        return is_terminated() or bool(self.piped and self.answers and self.answers[-1].finish is Finish.INTERRUPT)

    def _run_command(self, command: str, word: str) -> None:
        from hotset.cli.chat_commands import COMMANDS

        if command == "reset":
            self.conversation.reset()
            return
        try:
            views = COMMANDS[command](self, word) if command in COMMANDS else [f"there is no /{command}; {_HELP}"]
        except HotsetError as error:
            views = [f"error: {error}"]
        if not self.as_json:
            emit({}, False, *([_HELP] if command == "help" else views))

    def _answer(self, line: str) -> None:
        from hotset.cli.summary import answer_document

        try:
            with stop_on_signals() as stop:
                answer = self.conversation.send(line, (lambda _: None) if self.as_json else show, stop=stop)
        except HotsetError as error:
            if self.piped:
                raise
            sys.stderr.write(f"error: {error} (/reset starts a new conversation)\n")
            return
        if not self.as_json:
            finish_text(answer.text)
        self.answers.append(answer)
        reused = {"prompt": line, "reused_tokens": self.conversation.reused_tokens}
        self.turns.append(reused | answer_document(answer))

    def summary(self) -> str:
        """What the session cost so far, in a line."""
        from hotset.cli.summary import summary_line

        new, decode_s = sum(len(a.new_ids) for a in self.answers), sum(a.decode_s for a in self.answers)
        timed = sum(max(len(a.new_ids) - 1, 0) for a in self.answers)
        return summary_line(new, timed / decode_s if decode_s else None, self.conversation.text_model.stats())

    def end(self) -> None:
        """Say what the session cost."""
        from typer import Exit

        from hotset.cli.summary import cost_document

        if self.as_json:
            emit({"turns": self.turns} | cost_document(self.conversation.text_model), True)
        elif self.answers:
            aside(self.summary())
        if self._stopped():
            raise Exit(exit_code())


def _lines() -> Iterator[str]:
    """What a person types, with history, or the lines of a pipe."""
    if not sys.stdin.isatty():
        yield from _piped()
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - input() uses it once it is there
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            try:
                line = input("> ")
            except UnicodeDecodeError:
                aside("error: that was not UTF-8 text: set the terminal to UTF-8, or type it again")
                continue
            yield line
    sys.stdout.write("\n")


def _piped() -> Iterator[str]:
    """The lines of a pipe: as bytes, since one that is no text is named by its number."""
    from hotset.generation.prompt_files import MAX_TEXT_BYTES, decode

    for number in count(1):
        data = sys.stdin.buffer.readline(MAX_TEXT_BYTES)
        if not data:
            return
        yield decode(data, f"line {number:,} of stdin")
