"""The kernels that plan compile for GPUs of three generations, under `late` and `nextuse`, too."""

from __future__ import annotations

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
def test_plans_compile(capability: int) -> None:
    """All shapes for the newest generation, and by `make test-long` for all; in a process of its own.

    This one may be the interpreter's.
    """
    some = [] if LONG or capability == NEWEST else ["--some"]
    script = Path(__file__).with_name("compile_plans.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), *some, str(capability)]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    assert len(found.stdout.splitlines()) == (2 if some else 8)
