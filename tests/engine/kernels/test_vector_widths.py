"""What is promised to the bit holds for every width of the CPU's vectors, not only for this machine's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from examples import LONG

ROOT = Path(__file__).parents[3]
PROMISES = (
    "tests/engine/kernels/test_row_bits.py",
    "tests/families/test_exactness.py::test_a_family_computes_what_stock_computes",
    "tests/models/test_routers.py::test_a_model_that_predicts_computes_what_it_does_without",
)
QUICK = "test_row_bits or gpt_oss or qwen3_moe or nemotron_h"


@pytest.mark.parametrize(("capability", "files"), [("avx2", PROMISES), ("default", PROMISES if LONG else PROMISES[:1])])
def test_bits_hold_with_narrower_vectors(capability: str, files: tuple[str, ...]) -> None:
    """The suite itself runs with the widest that the machine has."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *files, "-k", QUICK]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**own, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
