"""Messages: quiet, verbose, and as log lines in a file, as text and as JSON; never a prompt or an answer."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path

import pytest
from calls import FEW, PROMPT, call

from hotset.cli.app import app
from hotset.cli.ending import run_and_report

pytestmark = pytest.mark.filterwarnings("default")


def test_quiet_is_the_text_alone() -> None:
    done = call("run", *PROMPT, *FEW, "-q")
    assert (done.code, done.err) == (0, "")
    assert done.out.strip()


def test_lines_of_a_log_file_are_json_and_hold_no_text(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    for _ in range(2):  # the second is added
        done = call("run", *PROMPT, *FEW, "-v", "--log-file", file, "--log-json")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [line["message"] for line in lines if line["logger"] == "hotset.steps"]
    assert steps == ["loading", "loaded", "answered", "closed"] * 2
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert all(line["time"].endswith("Z") for line in lines)
    answered = next(line for line in lines if line["message"] == "answered")
    assert (answered["new_tokens"], answered["sampling"], answered["finish"]) == (4, "greedy", "length")
    assert any("4 tokens, " in line["message"] for line in lines)
    assert done.out.strip() not in file.read_text()
    assert PROMPT[1] not in file.read_text()
    shown = [line[9:] for line in done.err.splitlines() if line[2:3] == ":"]  # with the time before it
    assert [line.split(":")[0] for line in shown] == ["loading", "loaded", "answered", "closed"]
    assert not logging.getLogger("hotset").handlers


def test_steps_that_are_said_begin_a_line_after_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both streams are one terminal."""
    screen = io.StringIO()
    with monkeypatch.context() as patched:
        patched.setattr("sys.stdout", screen)
        patched.setattr("sys.stderr", screen)
        assert run_and_report(lambda: app(["run", *PROMPT, *FEW, "-v"], standalone_mode=False)) == 0
    (line,) = (line for line in screen.getvalue().splitlines() if "answered: " in line)
    assert re.match(r"\d\d:\d\d:\d\d answered: ", line), screen.getvalue()


def test_notes_and_errors_are_logged_as_text(tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    call("run", *PROMPT, "--max-new-tokens", "2", "--log-file", file, "-q")  # everything fits, and a note says so
    assert "WARNING memory auto: all 512 experts fit" in file.read_text()
    refused = call("run", *PROMPT, "--memory", "2 slots", "--log-file", file)
    assert f"ERROR {refused.error}\n" in file.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-q", "-v"), "--quiet and --verbose exclude each other"),
        (("--log-json",), "pass --log-file FILE, too"),
        (("--log-file", "/no/such/folder/log"), "cannot write to /no/such/folder/log"),
    ],
)
def test_bad_words_are_one_line(words: tuple[str, ...], message: str) -> None:
    assert message in call("run", *PROMPT, *FEW, *words).error
