"""From `pip install` of a wheel to the first token of the reference model: in a fresh environment, cold and warm.

`install_s` is pip's time for the wheel and all it needs, from the indexes that pip is set to. `first_token_s` is from
the start of `hotset run` to the first byte of its answer: imports, load, compiling and prompt. Cold is the first run
after the install, with no compiled code; warm the second. `auto`: everything fits, and nothing is compiled. With
--before, another wheel is measured in the same way. Files are in the page cache. `cpu_s` is the processor time of the
same run.

python benchmarks/first_token.py --wheel hotset.whl [--before older.whl]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import publish

WORDS = ["run", "-p", "La stampante non risponde", "--max-new-tokens", "8"]
MEMORIES = ("auto", "25%")


def install(wheel: Path, place: Path) -> tuple[Path, float]:
    """A fresh environment with the wheel and its models extra; the command, and how long pip took."""
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    began_s = time.perf_counter()
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = Path(__file__).parents[1] / "constraints.txt"
    subprocess.run([*pip, "--constraint", str(constraints), f"{wheel}[models]"], check=True)
    return place / "bin" / "hotset", time.perf_counter() - began_s


def first_token(command: Path, memory: str, cache: Path) -> dict[str, float]:
    """Seconds from the start to the first byte of the answer, to the end, and of processor time."""
    known = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began_s = time.perf_counter()
    with subprocess.Popen(
        [str(command), *WORDS, "--memory", memory],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=known | {"NUMBA_CACHE_DIR": str(cache)},
        bufsize=0,
    ) as process:
        out = process.stdout
        if out is None or not out.read(1):
            raise SystemExit(f"{command} said nothing")
        first_s = time.perf_counter() - began_s
        out.read()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"first_token_s": first_s, "whole_s": time.perf_counter() - began_s, "cpu_s": cpu_s}


def measure(wheel: Path) -> dict[str, Any]:
    """Install, then run cold and warm with both budgets."""
    with tempfile.TemporaryDirectory(prefix="hotset-first-") as scratch:
        command, install_s = install(wheel, Path(scratch) / "venv")
        rows = []
        for memory in MEMORIES:
            for state in ("cold", "warm"):
                rows.append({"memory": memory, "state": state} | first_token(command, memory, Path(scratch) / "cache"))
                print(rows[-1], flush=True)
    return {"wheel_bytes": wheel.stat().st_size, "install_s": install_s, "rows": rows}


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    found = {"after": measure(options.wheel)}
    if options.before is not None:
        found["before"] = measure(options.before)
    publish("first_token", found)


if __name__ == "__main__":
    main()
