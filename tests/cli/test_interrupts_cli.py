"""Ctrl-C while a command begins, within libraries and while it saves; a terminal that is closed."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import pytest

from hotset.cli import interrupts
from hotset.cli.ending import run_and_report
from hotset.errors import HotsetError

pytestmark = pytest.mark.filterwarnings("default")


def test_ctrl_c_while_the_commands_are_imported_ends_without_a_word() -> None:
    """By the function that the installed command calls."""
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["hotset"].partition(":")
    code = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background has it ignored
class Pressed:
    def find_spec(self, name, *_):
        if name == "typer":  # the largest of what is imported
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Pressed())
from {module} import {function}
{function}()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (-signal.SIGINT, "", "")


def test_a_library_that_wraps_an_interrupt_is_no_fault_of_hotset(capsys: pytest.CaptureFixture[str]) -> None:
    class Pressed:
        def __set_name__(self, *_: object) -> None:
            raise KeyboardInterrupt

    def makes_a_class() -> None:  # of which Python 3.11 makes a RuntimeError
        try:
            type("Made", (), {"it": Pressed()})
        except KeyboardInterrupt as interrupt:
            raise RuntimeError from interrupt

    def fails_to_save() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise HotsetError("cannot write it")

    with interrupts.terminable():
        assert run_and_report(makes_a_class) == 130
        assert capsys.readouterr().err == ""
        assert run_and_report(fails_to_save) == 2
    assert capsys.readouterr().err == "error: cannot write it\n"


def test_a_closed_terminal_ends_a_command_once_and_nohup_goes_on() -> None:
    with interrupts.terminable(), interrupts.stop_on_signals() as stop:
        for _ in range(3):  # by the system and by the shell
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.asked
        assert interrupts.is_terminated()
        assert interrupts.exit_code() == 129
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts.terminable(), interrupts.stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.asked
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_said_to_a_closed_terminal_is_dropped() -> None:
    screen, end = pty.openpty()
    with open(end, "w", encoding="utf-8") as terminal, mock.patch.object(sys, "stdout", terminal):

        def speak() -> None:
            print("a line", flush=True)
            os.close(screen)
            for _ in range(2):
                print("and one more", flush=True)

        assert run_and_report(speak) == 0
