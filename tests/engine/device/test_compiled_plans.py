"""What plans and prefetches compiles for GPUs of four generations, as it is launched, under every policy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from examples import LONG

MOST = 90
"""The generation that kernels of all policies are compiled for, not only those of a model by default."""

pytest.importorskip("torch")
pytest.importorskip("triton")

from hotset.engine.device.policies import names  # noqa: E402


@pytest.mark.parametrize("capability", [80, 89, MOST, 100])
def test_plans_compile(capability: int) -> None:
    """In a process of its own: this one may be the interpreter's. All is compiled for all by `make test-long` only."""
    extent = "all" if LONG else "most" if capability == MOST else "some"
    script = Path(__file__).with_name("compile_plans.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), extent, str(capability)]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    made = {tuple(line.split()[1:4]) for line in found.stdout.splitlines()}
    sizes = ("1x32",) if extent == "some" else ("1x32", "8x128")
    for size in sizes:
        assert {("prefetch", size, kernel) for kernel in ("gather", "claim", "pick", "send")} <= made
        assert {("blend", size, "plan_event"), ("lru", size, "plan_event")} <= made
    planned = {spec.replace(",", ":").split(":")[0] for spec, _, kernel in made if kernel == "plan_event"}
    assert planned == ({"blend", "lru"} if extent == "some" else set(names()))
