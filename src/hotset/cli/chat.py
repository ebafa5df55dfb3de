"""`hotset chat`: a conversation, at a terminal or through a pipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotset.cli import run_options as opt
from hotset.cli.chat_input import messages
from hotset.cli.interrupts import exit_code, is_terminated, stop_on_signals
from hotset.cli.live import with_options
from hotset.cli.output import JsonFlag, emit, finish_text, message, show
from hotset.errors import HotsetError
from hotset.generation.sampling import Sampling
from hotset.options import RunOptions
from hotset.shape import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hotset.generation import Answer, Conversation
    from hotset.models.handle import Handle

    Views = Sequence[RenderableType]

_COMMAND = re.compile(r"/([A-Za-z]+|\?)(?:[ \t]+(.+))?")
_ENDS = ("bye", "exit", "quit")
_HELP = """/stats: what it cost   /stats LAYER or all: what is hot   /reset: forget all turns   /bye or Ctrl-D: end
/pins: what is pinned   /pin 20%: pin the hottest   /unpin: unpin all   /plot FILE: draw it   /mark NAME: name a moment
\"\"\" begins and ends a message of several lines; a pasted block is one message
Ctrl-C stops an answer, clears what is typed, and on an empty line, twice, ends the chat"""


@with_options
def chat(
    options: RunOptions,
    sampling: Sampling = Sampling(max_new_tokens=512),
    use_template: opt.UseTemplate = None,
    stats: opt.Stats = False,
    as_json: JsonFlag = False,
) -> None:
    """Talk with a model; through a pipe every line is a turn.

    A pasted block is one message, and so is what stands between two lines of three quotes.

    Example: hotset chat ./Qwen3-30B-A3B --memory 25% --learn italian-chat
    """
    from hotset.cli.loading import loaded_model
    from hotset.generation import Conversation

    with loaded_model(options) as text_model:
        if stats:
            text_model.handle.observe()
        session = ChatSession(Conversation(text_model, sampling.seeded(), use_template), as_json, stats)
        try:
            session.begin()
            for text in messages():
                if not session.take(text):
                    break
        except HotsetError:
            session.end()  # the turns before are not lost
            raise
        session.end()


class ChatSession:
    """Takes message after message, and keeps what came of them."""

    def __init__(self, conversation: Conversation, as_json: bool, detailed: bool = False) -> None:
        self.conversation, self.as_json, self.detailed = conversation, as_json, detailed
        self.piped = not sys.stdin.isatty()
        self.turns: list[dict[str, Any]] = []
        self.answers: list[Answer] = []

    @property
    def handle(self) -> Handle:
        """The cache of the model."""
        return self.conversation.text_model.handle

    def take(self, text: str) -> bool:
        """Answer a turn or run a command; false to end. Ctrl-C at a terminal ends no more than that."""
        try:
            return self._take(text)
        except KeyboardInterrupt:  # as an answer has just ended, or a second one
            if self.piped or is_terminated():
                raise
            return True

    def _take(self, text: str) -> bool:
        line = text.strip()
        if command := _COMMAND.fullmatch(line):
            if (name := command[1].lower()) in _ENDS:
                return False
            self._run_command(name, command[2] or "")
        elif line:
            self._answer(text.strip("\n").rstrip() if "\n" in line else line)  # a block keeps its indentation
        return not self._stopped()

    def _stopped(self) -> bool:
        """Whether the session is over: SIGTERM ends it, and Ctrl-C at a pipe, where no person is there to go on."""
        from hotset.generation import Finish

        return is_terminated() or bool(self.piped and self.answers and self.answers[-1].finish is Finish.INTERRUPT)

    def _run_command(self, command: str, word: str) -> None:
        if command == "reset":
            self.conversation.reset()
            message("a new conversation: all turns before are forgotten")
            return
        try:
            views = _COMMANDS[command](self, word) if command in _COMMANDS else [f"there is no /{command}; {_HELP}"]
        except HotsetError as error:
            views = [f"error: {error}"]
        if not self.as_json:
            emit({}, False, *views)

    def _answer(self, line: str) -> None:
        from hotset.cli.summary import answer_document, log_answer

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
        log_answer(answer)
        self.answers.append(answer)
        reused = {"prompt": line, "reused_tokens": self.conversation.reused_tokens}
        self.turns.append(reused | answer_document(answer))

    def summary(self) -> str:
        """What the session cost so far, in a line."""
        from hotset.cli.summary import summary_line

        new, decode_s = sum(len(a.new_ids) for a in self.answers), sum(a.decode_s for a in self.answers)
        timed = sum(max(len(a.new_ids) - 1, 0) for a in self.answers)
        stats = self.conversation.text_model.stats()
        return summary_line(new, timed / decode_s if decode_s else None, stats, self._chosen())

    def _chosen(self) -> str:
        """How tokens are chosen; the seed is that of the first turn."""
        conversation = self.conversation
        return conversation.sampling.within(conversation.text_model.model.generation_config).words()

    def begin(self) -> None:
        """Say what runs, to a person at a terminal."""
        if self.piped or self.as_json:
            return
        options, stats = self.conversation.text_model.options, self.conversation.text_model.stats()
        share = f"{format_size(stats['resident_bytes'])} of memory for experts"
        cached = "all of them" if stats["engine"] == "stock" else f"policy {stats['policy']}"
        message(f"{options.name}: {share}, {cached}; {self._chosen()}. /help lists commands, /bye ends the chat.")

    def end(self) -> None:
        """Say what the session cost."""
        from typer import Exit

        from hotset.cli.summary import cost_document, experts_document, experts_views

        if self.as_json:
            document = {"turns": self.turns} | cost_document(self.conversation.text_model)
            emit(document | (experts_document(self.conversation.text_model) if self.detailed else {}), True)
        elif self.answers:
            message(self.summary())
            message(*(experts_views(self.conversation.text_model) if self.detailed else ()))
        if self._stopped():
            raise Exit(exit_code())


def _stats(session: ChatSession, word: str) -> Views:
    """What it cost so far and what is hot, of all layers or in full of one."""
    from hotset.cli.summary import detail_line, experts_views, learning_lines
    from hotset.report.usage import expert_table

    if not word:
        found = session.handle.stats()
        return [session.summary(), detail_line(found), *learning_lines(found)]
    if word == "all":
        return [session.summary(), *experts_views(session.conversation.text_model)]
    statistics = session.handle.statistics()
    if not (word.isascii() and word.isdigit()) or len(word) > 6 or int(word) >= statistics.shape.layers:
        raise HotsetError(f"/stats takes a layer, 0 to {statistics.shape.layers - 1}, or all")
    return [expert_table(statistics, int(word), 10)]


def _pins(session: ChatSession, _: str) -> Views:
    """What is pinned, layer by layer."""
    layers: dict[int, list[int]] = {}
    for layer, expert in session.handle.pins():
        layers.setdefault(layer, []).append(expert)
    return [f"layer {layer}: {', '.join(map(str, found))}" for layer, found in layers.items()] or [
        "no expert is pinned"
    ]


def _pin(session: ChatSession, word: str) -> Views:
    """Pin the hottest."""
    if not word:
        raise HotsetError('say how much to pin, such as "/pin 20%"')
    session.handle.pin(word)
    return [f"{len(session.handle.pins())} experts pinned"]


def _unpin(session: ChatSession, _: str) -> Views:
    """Unpin all."""
    session.handle.unpin()
    return ["no expert is pinned any more"]


def _plot(session: ChatSession, word: str) -> Views:
    """Draw what is hot."""
    if not word:
        raise HotsetError('say where to draw it, such as "/plot chat.png"')
    session.handle.plot(Path(word))
    return [f"drawn to {word}"]


def _mark(session: ChatSession, word: str) -> Views:
    """Name what begins here."""
    session.handle.mark(word or "mark")
    return [f"marked: {word or 'mark'}"]


_COMMANDS: dict[str, Callable[[ChatSession, str], Views]] = {
    "stats": _stats,
    "pins": _pins,
    "pin": _pin,
    "unpin": _unpin,
    "plot": _plot,
    "mark": _mark,
    "help": lambda *_: [_HELP],
    "?": lambda *_: [_HELP],
}
