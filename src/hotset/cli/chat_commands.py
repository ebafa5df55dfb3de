"""What a person can ask in the middle of a conversation, after a slash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from hotset.cli.summary import experts_views, learning_lines
from hotset.errors import HotsetError
from hotset.report.usage import expert_table

if TYPE_CHECKING:
    from hotset.cli.chat import ChatSession

Views = Sequence[RenderableType]


def _handle(session: ChatSession) -> Any:
    return session.conversation.text_model.handle


def stats(session: ChatSession, word: str) -> Views:
    """What it cost so far and what is hot, of all layers or in full of one."""
    if not word:
        return [session.summary(), *learning_lines(session.conversation.text_model.stats())]
    if word == "all":
        return [session.summary(), *experts_views(session.conversation.text_model)]
    statistics = _handle(session).statistics()
    if not (word.isascii() and word.isdigit()) or len(word) > 6 or int(word) >= statistics.shape.layers:
        raise HotsetError(f"/stats takes a layer, 0 to {statistics.shape.layers - 1}, or all")
    return [expert_table(statistics, int(word), 10)]


def pins(session: ChatSession, _: str) -> Views:
    """What is pinned, layer by layer."""
    layers: dict[int, list[int]] = {}
    for layer, expert in _handle(session).pins():
        layers.setdefault(layer, []).append(expert)
    return [f"layer {layer}: {', '.join(map(str, found))}" for layer, found in layers.items()] or [
        "no expert is pinned"
    ]


def pin(session: ChatSession, word: str) -> Views:
    """Pin the hottest."""
    if not word:
        raise HotsetError('say how much to pin, such as "/pin 20%"')
    _handle(session).pin(word)
    return [f"{len(_handle(session).pins())} experts pinned"]


def unpin(session: ChatSession, _: str) -> Views:
    """Unpin all."""
    _handle(session).unpin()
    return ["no expert is pinned any more"]


def plot(session: ChatSession, word: str) -> Views:
    """Draw what is hot."""
    if not word:
        raise HotsetError('say where to draw it, such as "/plot chat.png"')
    _handle(session).plot(Path(word))
    return [f"drawn to {word}"]


def mark(session: ChatSession, word: str) -> Views:
    """Name what begins here."""
    _handle(session).mark(word or "mark")
    return []


COMMANDS: dict[str, Callable[[ChatSession, str], Views]] = {
    "stats": stats,
    "pins": pins,
    "pin": pin,
    "unpin": unpin,
    "plot": plot,
    "mark": mark,
    "help": lambda *_: [],
}
