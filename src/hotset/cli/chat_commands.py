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
    from hotset.cli.chat import Talk

Views = Sequence[RenderableType]


def _handle(talk: Talk) -> Any:
    return talk.conversation.loaded.model.hotset


def stats(talk: Talk, word: str) -> Views:
    """What it cost so far and what is hot, of all layers or in full of one."""
    if not word:
        return [talk.summary(), *learning_lines(talk.conversation.loaded.stats())]
    if word == "all":
        return [talk.summary(), *experts_views(talk.conversation.loaded)]
    statistics = _handle(talk).statistics()
    if not (word.isascii() and word.isdigit()) or len(word) > 6 or int(word) >= statistics.shape.layers:
        raise HotsetError(f"/stats takes a layer, 0 to {statistics.shape.layers - 1}, or all")
    return [expert_table(statistics, int(word), 10)]


def pins(talk: Talk, _: str) -> Views:
    """Who is pinned, layer by layer."""
    layers: dict[int, list[int]] = {}
    for layer, expert in _handle(talk).pins():
        layers.setdefault(layer, []).append(expert)
    return [f"layer {layer}: {', '.join(map(str, found))}" for layer, found in layers.items()] or ["nobody is pinned"]


def pin(talk: Talk, word: str) -> Views:
    """Pin the hottest."""
    if not word:
        raise HotsetError('say how much to pin, such as "/pin 20%"')
    _handle(talk).pin(word)
    return [f"{len(_handle(talk).pins())} experts pinned"]


def unpin(talk: Talk, _: str) -> Views:
    """Let all pins go."""
    _handle(talk).unpin()
    return ["nobody is pinned any more"]


def plot(talk: Talk, word: str) -> Views:
    """Draw what is hot."""
    if not word:
        raise HotsetError('say where to draw it, such as "/plot chat.png"')
    _handle(talk).plot(Path(word))
    return [f"drawn to {word}"]


def mark(talk: Talk, word: str) -> Views:
    """Name what begins here."""
    _handle(talk).mark(word or "mark")
    return []


COMMANDS: dict[str, Callable[[Talk, str], Views]] = {
    "stats": stats,
    "pins": pins,
    "pin": pin,
    "unpin": unpin,
    "plot": plot,
    "mark": mark,
    "help": lambda *_: [],
}
