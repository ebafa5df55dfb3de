"""`--help` of every command: words for what options take, none for flags, and the same exit code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from calls import call

from hotset.cli.app import app

pytestmark = pytest.mark.filterwarnings("default")


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command, and of the groups that they are in."""
    yield words
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*words, name))


EVERY = list(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_help_names_no_types_of_python(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    shown = call(*words, "--help")
    assert (shown.code, shown.err) == (0, "")
    assert not re.search(r"<[a-z]|range\b.*\[|\.\.\.\}", shown.out), shown.out
    assert re.search(r"--help +-h +Show", shown.out), shown.out


def test_options_say_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    shown = call("run", "--help").out
    for option in (r"--prompt +-p +TEXT ", r"--file +PATH ", r"--top-k +NUMBER ", r"--trace +OUT ", r"--json +Print"):
        assert re.search(option, shown), option
    assert re.search(r"simulate \[OPTIONS\] \{?TRACE\}?\.\.\.", call("simulate", "--help").out)
