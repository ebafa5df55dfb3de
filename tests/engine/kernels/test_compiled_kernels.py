"""The expert kernels compile for GPUs of three generations with every format, and load whole words of codes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from examples import LONG

NEWEST = 90

pytest.importorskip("torch")
pytest.importorskip("triton")


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_kernels_compile(capability: int) -> None:
    """Every format for the newest generation, and by `make test-long` for all; in a process of its own.

    This one may be the interpreter's.
    """
    some = [] if LONG or capability == NEWEST else ["--some"]
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), *some, str(capability)]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    lines = found.stdout.splitlines()
    assert len(lines) == (22 if some else 71)
    for line in lines:
        codes = ast.literal_eval(line[line.index("{") :])
        assert not any("evict_first" in word and word.endswith(("b8", "b16")) for word in codes), line
