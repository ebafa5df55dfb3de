"""The expert kernels compile for GPUs of four generations, and load whole words of codes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from examples import LONG

MOST = 90
"""The generation that kernels are compiled for with every format; for the others, with some each."""
KERNELS = ("up", "down", "up units", "down units", "decode")
COUNTS = {80: 8, 89: 8, MOST: 71, 100: 7}

pytest.importorskip("torch")
pytest.importorskip("triton")


def test_kernels_compile() -> None:
    """Every format for one generation, and by `make test-long` for all; in a process of its own.

    This one may be the interpreter's.
    """
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    asked = [
        word for number in COUNTS for word in ("all" if LONG or number == MOST else "some", str(number))
    ]  # fmt: skip
    command = [sys.executable, str(script), *asked]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    lines = found.stdout.splitlines()
    for capability, count in COUNTS.items():
        own = [line for line in lines if line.startswith(f"{capability} ")]
        assert len(own) == (COUNTS[MOST] if LONG else count)
        assert all(any(f" {kernel}:" in line for line in own) for kernel in KERNELS)
    for line in lines:
        codes = ast.literal_eval(line[line.index("{") :])
        assert not any("evict_first" in word and word.endswith(("b8", "b16")) for word in codes), line
