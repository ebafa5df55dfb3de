"""Full and closed streams, text that is none, and characters that steer terminals: a line or silence, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calls import FEW, PROMPT, call, model_folder

from hotset import reference
from hotset.cli import output
from hotset.cli.ending import run_and_report
from hotset.text import printable, without_controls

pytestmark = pytest.mark.filterwarnings("default")

ESCAPE = "\x1b[31m"


def shell(line: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """A command as a person types it; `hotset` is this interpreter's."""
    line = line.replace("hotset", f"{sys.executable} -m hotset", 1)
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, **more)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["version", "trace info reference:c --json", "trace info reference:c", "run --help"])
def test_a_full_stdout_is_told_in_one_line(words: str) -> None:
    done = shell(f"hotset {words} > /dev/full")
    assert done.returncode == 2
    assert done.stderr == "error: cannot write to stdout (No space left on device): choose another place\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_stdout_in_the_middle_of_an_answer_is_told_in_one_line() -> None:
    pytest.importorskip("transformers")
    done = shell("hotset run -p Il --memory 25% --max-new-tokens 4 > /dev/full")
    assert done.returncode == 2
    assert done.stderr == "error: cannot write to stdout (No space left on device): choose another place\n"


def test_a_reader_that_leaves_ends_a_command_quietly() -> None:
    done = shell("hotset trace info reference:c --json | true; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("streams", [">&-", "2>&-", "2>/dev/full", "<&-"])
def test_closed_streams_give_no_traceback(streams: str) -> None:
    done = shell(f"hotset version {streams}")
    assert done.returncode == 0
    assert done.stderr == ""


def test_what_stdouts_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    name = os.fsdecode(b"caff\xe8-\xff.safetensors")
    done = shell(f"hotset trace cut reference:c --first 5 -o {name!r}", cwd=tmp_path)
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = shell("hotset trace info *.safetensors | cat", cwd=tmp_path, env=env)
    assert done.stderr == ""
    assert "tokens" in done.stdout


def test_a_fault_of_hotset_itself_is_one_line_and_can_be_looked_into(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        raise KeyError("a bug")

    assert run_and_report(work) == 1
    assert capsys.readouterr().err == (
        "error: hotset failed (KeyError: 'a bug'): run it again with HOTSET_DEBUG=1 and report what it shows\n"
    )
    monkeypatch.setenv("HOTSET_DEBUG", "1")
    assert run_and_report(work) == 1
    assert "in work" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("run", *PROMPT, "--seed", "-1"),
        ("run", *PROMPT, "--seed", str(2**70)),
        ("run", *PROMPT, "--max-new-tokens", "0"),
        ("run", *PROMPT, "--max-new-tokens", str(10**30)),
        ("run", *PROMPT, "--temperature", "nan"),
        ("run", *PROMPT, "--temperature", "inf"),
        ("run", *PROMPT, "--top-p", "nan"),
        ("run", *PROMPT, "--learn-every", "nan"),
        ("run", *PROMPT, "--learn-every", "inf"),
        ("run", *PROMPT, "--prior", str(10**30)),
        ("run", *PROMPT, "--memory", "\x1b[31mmuch"),
        ("run", "--nonsense"),
        ("nonsense\x1b[31m",),
        ("trace", "split", "reference:c", "--fit", "a", "--judge", "b", "--seed", str(2**70), "--fraction", "nan"),
    ],
)
def test_absurd_numbers_and_words_are_told_in_one_line(words: tuple[str, ...]) -> None:
    assert call(*words).error


def test_seeds_up_to_the_largest_work() -> None:
    pytest.importorskip("transformers")
    words = ("--temperature", "0.8", "--seed", str(2**64 - 1))
    assert call("run", *PROMPT, *FEW, *words).out == call("run", *PROMPT, *FEW, *words).out


def test_bytes_that_are_no_text_are_told(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"ciao\xff")
    assert "not UTF-8 text (byte 4)" in call("run", "--file", file, *FEW).error
    assert "not UTF-8 text" in call("run", "--file", "-", *FEW, told=b"\xc3(").error
    assert "not UTF-8 text" in call("trace", "record", "--prompts", file, "-o", tmp_path / "t").error
    assert "not UTF-8 text" in call("run", "-p", os.fsdecode(b"ciao\xff"), *FEW).error
    said = call("chat", *FEW, told=b"ciao\n\xff\xfe\n")
    assert said.code == 2
    assert "line 2 of stdin is not UTF-8 text" in said.err
    assert "Traceback" not in said.err


def test_a_prompt_may_come_through_a_pipe_of_the_shell() -> None:
    """As the shell writes `--file <(echo Il mercato del)`."""
    pytest.importorskip("transformers")
    readable, writable = os.pipe()
    os.write(writable, b"Il mercato del\n")
    os.close(writable)
    done = call("run", "--file", f"/dev/fd/{readable}", "--json", *FEW)
    os.close(readable)
    assert json.loads(done.out)["new_tokens"] == 4


def test_a_chat_with_json_is_one_document(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    place = model_folder(tmp_path / "model")
    (place / "chat_template.jinja").write_text("{{1/0}}")
    done = call("chat", place, *FEW, "--json", told=b"ciao\n")
    assert done.error
    assert json.loads(done.out)["turns"] == []
    some = call("chat", *FEW, "--json", told=b"ciao\n\xff\n")
    assert some.error
    assert len(json.loads(some.out)["turns"]) == 1
    whole = call("chat", *FEW, "--json", told=b"/stats\nciao\n/nonsense\n")
    assert len(json.loads(whole.out, parse_constant=pytest.fail)["turns"]) == 1


def hostile_trace(path: Path) -> Path:
    """A trace whose words would steer a terminal, and whose tags rich would obey or choke on."""
    words = {f"{ESCAPE}[bold]key": f"{ESCAPE}\r[/nothing]:smile:\x07"}
    trace = reference.trace("c").take(slice(0, 60))
    meta = {"model": f"{ESCAPE}[bold]m[/nothing]", "source": f"a\nb{ESCAPE}"}
    replace(trace, meta=meta, labels=tuple(words for _ in range(trace.requests))).save(path)
    return path


@pytest.mark.parametrize("words", [("trace", "info"), ("simulate", "-p", "lru", "-b", "25%", "--fit", "0")])
def test_nothing_of_a_hostile_trace_steers_the_terminal(tmp_path: Path, words: tuple[str, ...]) -> None:
    path = hostile_trace(tmp_path / f"{ESCAPE}[bold]x[nothing].safetensors")
    done = call(*words, path)
    assert done.code == 0, done
    assert without_controls(done.out + done.err) == done.out + done.err
    assert "[bold]" in done.out


def test_the_names_of_a_model_and_a_profile_do_not_steer_the_terminal(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    place = model_folder(tmp_path / f"{ESCAPE}[bold]model")
    for done in (
        call("run", place / "none", *PROMPT),
        call("doctor", place),
        call("run", place, *PROMPT, *FEW, "--profile", f"{ESCAPE}p"),
        call("profile", "show", f"{ESCAPE}[bold]p"),
        call("profile", "make", "reference:c", "-o", str(tmp_path / f"{ESCAPE}[bold]p")),
    ):
        assert done.code in (0, 2), done
        assert without_controls(done.out + done.err) == done.out + done.err


def test_generated_text_is_bare_in_a_pipe_and_tame_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def __init__(self, is_terminal: bool) -> None:
            self.is_terminal, self.text = is_terminal, ""

        def isatty(self) -> bool:
            return self.is_terminal

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

    text = f"{ESCAPE}a\tb\r\nc\x9b\U0001f468\u200d\U0001f469"
    for is_terminal, shown in ((False, text), (True, "?[31ma\tb\nc?\U0001f468\u200d\U0001f469")):
        monkeypatch.setattr(sys, "stdout", Terminal(is_terminal))
        output.show(text)
        assert sys.stdout.text == shown  # type: ignore[attr-defined]


def test_printable() -> None:
    assert printable("caffè \U0001f600") == "caffè \U0001f600"
    assert printable("a\nb\x1b\u202e\ud800") == "a b???"
