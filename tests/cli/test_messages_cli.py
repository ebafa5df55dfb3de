"""Commands that work for long take -q, -v and logs after their names; sizes without a unit are asked about."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from calls import FEW, PROMPT, call

from hotset.cli.app import app
from hotset.cli.budgets import settled, settled_size

MESSAGES = {"--quiet", "--verbose", "--log-file", "--log-json"}
LONG = [
    "run", "chat", "pack", "prune", "compare", "doctor", "compile", "plan", "simulate", "forecast", "study", "analyze",
    "trace import", "trace record",
]  # fmt: skip

REPLAY = ("simulate", "reference:it", "-p", "lru", "-b", "25%", "--fit", "0")

pytestmark = pytest.mark.filterwarnings("default")


def command(words: str) -> Any:
    """A command by its words."""
    found: Any = typer.main.get_command(app)
    for word in words.split():
        found = found.commands[word]
    return found


@pytest.mark.parametrize("words", LONG)
def test_commands_that_work_for_long_take_them_all(words: str) -> None:
    known = [option for param in command(words).params for option in param.opts]
    assert MESSAGES | {"-q", "-v"} <= set(known)
    assert len(known) == len(set(known))


def test_quiet_and_logs_of_a_replay(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    quiet = call(*REPLAY, "-q", "--log-file", file, "--log-json")
    assert (quiet.code, quiet.err) == (0, "")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    replaying = [line for line in lines if line["message"].startswith("replaying")]
    assert [line["message"] for line in replaying] == ["replaying", "replaying: done"]
    assert replaying[0]["of"] == 2  # lru and the optimum
    assert replaying[1]["seconds"] >= 0
    told = call(*REPLAY, "-v")
    assert told.out == quiet.out
    assert "replaying: of 2" in told.err


def test_an_error_of_a_replay_is_logged(tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    refused = call("simulate", tmp_path / "none.safetensors", "--log-file", file)
    assert f"ERROR {refused.error}\n" in file.read_text()
    assert "--quiet and --verbose exclude each other" in call("forecast", "reference:it", "-q", "-v").error
    assert "pass --log-file FILE, too" in call("doctor", "--log-json").error


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (("-q", "simulate", "reference:it"), "-q: it goes after the command, as in hotset simulate -q"),
        (("--log-file", "x", "study", "bytes"), "as in hotset study --log-file"),
        (("-v", "trace", "import", "x"), "as in hotset trace import -v"),
        (("trace", "-q", "record"), "as in hotset trace record -q"),
    ],
)
def test_before_the_command_they_are_refused_with_the_words(
    words: tuple[str, ...], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["hotset", *words])
    assert place in call(*words).error


def test_what_no_command_takes_has_no_place() -> None:
    assert "goes after" not in call("--nope", "simulate").error


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (("run", *PROMPT, "--process-memory", "2"), "2"),
        (("plan", "--shape", "qwen3-30b-a3b", "--gpu", "12", "--ram", "32GiB"), "12"),
        (("plan", "--shape", "qwen3-30b-a3b", "--gpu", "0", "--ram", "32"), "32"),
        (("plan", "--shape", "qwen3-30b-a3b", "--gpu", "0", "--more", "8"), "8"),
    ],
)
def test_a_size_without_a_unit_is_refused_in_a_pipe(words: tuple[str, ...], number: str) -> None:
    assert call(*words).error == (
        f'"{number}" is {number} GiB, or {number} bytes? Write "{number}GiB", or "{number}B" for bytes'
    )


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a person at a terminal types, line by line, and then Ctrl-D."""
    found: list[str] = []

    def typed() -> str:
        if not found:
            raise EOFError
        return found.pop(0)

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", typed)
    return found


def test_at_a_terminal_a_size_without_a_unit_is_asked_about(answers: list[str]) -> None:
    answers += ["what?", "g", "b"]
    assert settled_size("12") == "12GiB"
    assert settled_size("12") == "12B"
    assert [settled_size(text) for text in ("12GiB", "0", "2000000", "12B")] == ["12GiB", "0", "2000000", "12B"]


@pytest.mark.parametrize("word", ["%", "25%", "25 %", "percent", "25 percent", " PERCENT "])
def test_a_share_is_understood_however_it_is_answered(word: str, answers: list[str]) -> None:
    answers.append(word)
    assert settled("25") == "25%"


@pytest.mark.parametrize("word", ["b", "25b", "25 B", "bytes", "25 bytes"])
def test_bytes_are_understood_however_they_are_answered(word: str, answers: list[str]) -> None:
    answers += [word, word]
    assert settled("25") == "25B"
    assert settled_size("25") == "25B"


@pytest.mark.parametrize("typed", [[], [""], ["25"], ["what", "is", "this", "%"]])
def test_no_answer_ends_in_the_line_that_names_both(typed: list[str], answers: list[str]) -> None:
    answers += typed
    assert settled("25") == "25"  # which the check of the option refuses
    assert len(answers) <= 1


def test_the_limit_of_a_process_says_what_it_leaves() -> None:
    done = call("run", *PROMPT, *FEW[2:], "--process-memory", "4GiB")
    (line,) = (line for line in done.err.splitlines() if "--process-memory" in line)
    assert line.startswith("note: --process-memory 4GiB: the process takes ")
    assert re.search(r"takes [\d.]+ [MG]iB beside the experts, which leaves room for all 24.0 MiB of them$", line)


def test_options_of_earlier_versions_are_not_suggested() -> None:
    assert call("chat", "--prompt", "x").error == "No such option: --prompt (see hotset chat --help)"
    told = "Got unexpected extra argument(s) (Il mare): the prompt goes behind -p, in quotes (see hotset run --help)"
    assert call("run", "reference", "Il mare").error == told
    assert "--top-p" in call("run", "--top-n", "3").error
