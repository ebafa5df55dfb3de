"""A sample of the stress script that gives mutated files to every reader; the script itself runs thousands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "trust" / "readers.py"


def test_mutated_files_are_read_or_refused_in_one_line() -> None:
    command = [sys.executable, str(SCRIPT), "--count", "80", "--seed", "5", "--dry"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "80 cases, 0 faults" in done.stdout
