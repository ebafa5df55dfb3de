"""The command line as a process would run it, in this process: its exit code, and what it wrote to its streams."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from hotset import reference
from hotset.cli.app import app
from hotset.cli.ending import run_and_report

FEW = ("--memory", "25%", "--max-new-tokens", "4")
PROMPT = ("-p", "Il mercato del")


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of an error of the input."""
        lines = [line for line in self.err.splitlines() if not line.startswith("note:")]
        assert self.code == 2, self
        assert len(lines) == 1, self
        assert lines[0].startswith("error: "), self
        assert lines[0].isprintable(), self
        return lines[0].removeprefix("error: ")


def call(*words: str | Path, told: bytes = b"") -> Ended:
    """Run a command with these bytes as its stdin."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))
    given = io.TextIOWrapper(io.BytesIO(told), encoding="utf-8")
    with mock.patch.multiple(sys, stdin=given, stdout=out, stderr=err):
        try:
            code = run_and_report(lambda: app([str(word) for word in words], standalone_mode=False, prog_name="hotset"))
        except SystemExit as left:
            code = int(str(left.code))
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8"))  # type: ignore[attr-defined]
    return Ended(code, *texts)


def model_folder(place: Path, **changes: Any) -> Path:
    """A copy of the reference model with values of its JSON files replaced: `config={"hidden_size": 1}`."""
    shutil.copytree(reference.path(), place)
    for name, values in changes.items():
        file = place / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return place
