"""SIGTERM and a closed terminal end a command as Ctrl-C does: what was learnt and recorded is kept."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from calls import call

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hotset import Trace
from hotset.cli import interrupts
from hotset.errors import HotsetError
from hotset.generation.checkpoints import Checkpoints, part_of
from hotset.profile import Profile
from hotset.profile.folder import check_writable
from hotset.trace.synth import SynthConfig, synthesise

pytestmark = pytest.mark.filterwarnings("default")
TIMEOUT_S = 300
TWO = ("--max-new-tokens", "2")


def hotset(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hotset", *map(str, words)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def when(true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until something has happened."""
    until = time.monotonic() + TIMEOUT_S
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


def ended(process: subprocess.Popen[str], number: int) -> tuple[int, str]:
    process.send_signal(number)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert "Traceback" not in errors
    return process.returncode, errors


def recording(tmp_path: Path) -> tuple[subprocess.Popen[str], Path]:
    """A recording that would go on for long, once it has kept something."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "t.safetensors"
    prompts.write_text("".join(f'{{"prompt": "Il mare", "number": "{n}"}}\n' for n in range(5000)))
    words = ["--prompts", prompts, "-o", out, "--max-new-tokens", 4, "--memory", "25%"]
    process = hotset("trace", "record", *words)
    when(part_of(out).exists, process)
    return process, out


def test_a_recording_that_is_terminated_loses_nothing(tmp_path: Path) -> None:
    process, out = recording(tmp_path)
    kept = Trace.load(part_of(out)).requests
    code, errors = ended(process, signal.SIGTERM)
    assert code == 143, errors
    assert "prompts are in the trace" in errors
    trace = Trace.load(out)
    assert trace.requests >= kept
    assert len(trace.labels) == trace.requests
    assert not part_of(out).exists()


def test_a_recording_that_is_killed_leaves_a_trace_beside_which_is_not_written_over(tmp_path: Path) -> None:
    process, out = recording(tmp_path)
    ended(process, signal.SIGKILL)
    trace = Trace.load(part_of(out))
    assert trace.requests > 0
    assert len(trace.labels) == trace.requests
    assert not out.exists()
    again = [
        "trace",
        "record",
        "--prompts",
        tmp_path / "prompts.jsonl",
        "-o",
        out,
        "--limit",
        "1",
        "--max-new-tokens",
        "2",
    ]
    assert f"{part_of(out)} is a trace of all that an earlier recording had when it was killed" in call(*again).error
    assert call(*again, "--force").code == 0
    assert Trace.load(out).requests == 1
    assert not part_of(out).exists()


def test_what_was_learnt_and_traced_is_kept_when_run_is_terminated(tmp_path: Path) -> None:
    learnt, traced = tmp_path / "p.safetensors", tmp_path / "t.safetensors"
    words = ["run", "-p", "Il mare", "--max-new-tokens", 900, "--memory", "25%", "--learn", learnt, "--trace", traced]
    process = hotset(*words)
    assert process.stdout is not None
    assert process.stdout.read(20)  # it answers
    code, errors = ended(process, signal.SIGTERM)
    assert code == 143, errors
    assert Profile.load(learnt).tokens.sum() == Trace.load(traced).tokens > 3


def test_a_pack_that_is_terminated_goes_on_where_it_stopped(tmp_path: Path) -> None:
    from hotset import reference

    out = tmp_path / "packed"
    process = hotset("pack", reference.path(), "-o", out)
    when(lambda: any(tmp_path.iterdir()), process)
    code, _ = ended(process, signal.SIGTERM)
    assert code in (143, 0)  # it may have been done by then
    assert code == 0 or not out.exists()
    assert call("pack", reference.path(), "-o", out).code == 0
    assert call("pack", "--verify", out).code == 0


def test_a_signal_while_something_is_saved_is_held_back_and_a_second_is_not() -> None:
    done: list[str] = []

    def save(*numbers: int) -> None:
        with interrupts.terminable(), interrupts.saving():
            for number in numbers:
                os.kill(os.getpid(), number)
            done.append("saved")

    with pytest.raises(KeyboardInterrupt):
        save(signal.SIGTERM)
    assert done == ["saved"]
    assert interrupts.exit_code() == 143
    with pytest.raises(KeyboardInterrupt):
        save(signal.SIGINT, signal.SIGINT)
    assert done == ["saved"]
    assert interrupts.exit_code() == 130


def test_an_interrupt_while_text_is_executed_leaves_the_exit_code(tmp_path: Path) -> None:
    """As in imports of large libraries, which make classes that way."""
    (tmp_path / "sitecustomize.py").write_text(
        "import hotset.cli.app as app, os, signal\n"
        "def work():\n"
        "    exec('import os, signal; os.kill(os.getpid(), signal.SIGTERM); [None for _ in range(9)]')\n"
        "app.app = lambda **_: work()\n"
    )
    paths = os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)])
    command = [sys.executable, "-m", "hotset", "version"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, check=False)
    assert done.returncode == 143, done


def test_what_was_learnt_and_traced_is_kept_when_the_terminal_is_closed(tmp_path: Path) -> None:
    learnt, traced = tmp_path / "p.safetensors", tmp_path / "t.safetensors"
    child, screen = pty.fork()
    words = ["run", "-p", "Il mare", "--max-new-tokens", 900, "--memory", "25%", "--learn", learnt, "--trace", traced]
    if not child:
        os.execv(sys.executable, [sys.executable, "-W", "ignore", "-m", "hotset", *map(str, words)])  # noqa: S606
    said = b""
    while b"document" not in said:  # it answers
        said += os.read(screen, 1 << 10)
    os.close(screen)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 129
    assert Profile.load(learnt).tokens.sum() == Trace.load(traced).tokens > 3


def test_blocks_for_signals_do_nothing_in_other_threads() -> None:
    entered = []

    def work() -> None:
        with interrupts.terminable(), interrupts.saving(), interrupts.interruptible():
            entered.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [True]


def test_checkpoints_are_written_when_it_is_time_and_go_at_the_end(tmp_path: Path) -> None:
    trace = synthesise(SynthConfig(layers=2, experts=4, top_k=1, requests=2, prompt_tokens=2, new_tokens=2))
    often, seldom = Checkpoints(tmp_path / "a.safetensors", 0.0), Checkpoints(tmp_path / "b.safetensors", 1e9)
    for each in (often, seldom):
        each.offer(lambda: trace)
    assert Trace.load(tmp_path / "a.part.safetensors").requests == 2
    assert not seldom.path.exists()
    often.end()
    assert not often.path.exists()


@pytest.mark.parametrize("command", ["run", "record"])
def test_a_trace_that_cannot_be_written_is_refused_before_the_work(command: str, tmp_path: Path) -> None:
    place = tmp_path / "folder.safetensors"
    place.mkdir()
    prompts = tmp_path / "p.txt"
    prompts.write_text("Il mare\n")
    words = {
        "run": ["run", "-p", "x", "--trace", place, "--force"],
        "record": ["trace", "record", "--prompts", prompts, "-o", place, "--force"],
    }[command]
    assert call(*words) == (2, "", f"error: {place} is a folder: give the name of a file\n")


def test_a_profile_that_cannot_be_used_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "p.safetensors", tmp_path / f"{'n' * 300}.safetensors"):
        with pytest.raises(HotsetError, match="cannot write "):
            check_writable(path)
    monkeypatch.setattr("hotset.cli.loading.compile_first", lambda *_: pytest.fail("that takes minutes"))
    refused = call("run", "-p", "x", "--learn", tmp_path / "file" / "p.safetensors")
    assert refused.error.startswith("cannot write ")
    assert not refused.out
    assert "no such profile" in call("run", "-p", "x", "--profile", tmp_path / "none.safetensors").error


def test_a_folder_without_the_right_to_write_is_refused_before_the_work(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(HotsetError, match="cannot write"):
        check_writable(tmp_path / "p.safetensors")
