"""What plans and prefetches compiles for GPUs of four generations, as it is launched, under every policy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from examples import LONG

EXTENTS = {80: "some", 89: "some", 90: "most", 100: "some"}
"""Kernels of all policies are compiled for one generation, those of a model by default for the others, too."""

pytest.importorskip("torch")
pytest.importorskip("triton")

from hotset.engine.device.policies import names  # noqa: E402


def test_plans_compile() -> None:
    """In a process of its own: this one may be the interpreter's. All is compiled for all by `make test-long` only."""
    extents = {capability: "all" if LONG else extent for capability, extent in EXTENTS.items()}
    script = Path(__file__).with_name("compile_plans.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [word for capability, extent in extents.items() for word in (extent, str(capability))]
    command = [sys.executable, str(script), *words]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    lines = [line.split() for line in found.stdout.splitlines()]
    for capability, extent in extents.items():
        made = {tuple(line[1:4]) for line in lines if line[0] == str(capability)}
        for size in ("1x32",) if extent == "some" else ("1x32", "8x128"):
            assert {("prefetch", size, kernel) for kernel in ("gather", "claim", "pick", "send")} <= made
            assert {("blend", size, "plan_event"), ("lru", size, "plan_event")} <= made
        planned = {spec.replace(",", ":").split(":")[0] for spec, _, kernel in made if kernel == "plan_event"}
        assert planned == ({"blend", "lru"} if extent == "some" else set(names()))
