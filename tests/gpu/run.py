"""`make gpu-test`: all tests that need a GPU, files side by side in processes; the result is kept with digests."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from covered import RESULT, ROOT, changed_files, digests, test_files

LIMIT_S = 420
"""What one file may take: all of them together have eight minutes."""


def run_file(path: Path, folder: Path) -> dict[str, Any]:
    """Run the tests of one file in a process of its own."""
    report = folder / f"{path.stem}.xml"
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "pytest", str(path), "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    began_s = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        output, code = f"{(error.stdout or b'').decode(errors='replace')}\nran past {LIMIT_S} s", 124
    return {
        "file": path.relative_to(ROOT).as_posix(),
        "seconds": round(time.monotonic() - began_s, 1),
        "code": code,
        "output": output,
        **counts(report),
    }


def counts(report: Path) -> dict[str, int]:
    """How many tests of a report passed, failed and were skipped."""
    if not report.exists():
        return {"passed": 0, "failed": 1, "skipped": 0}
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))  # noqa: S314 - pytest has just written it

    def total(name: str) -> int:
        return sum(int(suite.get(name, 0)) for suite in suites)

    failed, skipped = total("failures") + total("errors"), total("skipped")
    return {"passed": total("tests") - failed - skipped, "failed": failed, "skipped": skipped}


def one_run(files: list[Path], processes: int) -> dict[str, Any]:
    """Run all files once, so many at a time, in this order."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        found = list(pool.map(lambda path: run_file(path, Path(folder)), files))
    for each in found:
        code_failed = each["code"] not in (0, 5) and not each["failed"]
        each["failed"] += code_failed  # a crash of the interpreter leaves no report of it
        line = "{file}: {passed} passed, {failed} failed, {skipped} skipped in {seconds} s".format(**each)
        sys.stdout.write(f"{line}\n{each['output'][-6000:] if each['failed'] else ''}")
        sys.stdout.flush()
    total = {name: sum(each[name] for each in found) for name in ("passed", "failed", "skipped")}
    files_of = [{name: each[name] for name in each if name != "output"} for each in found]
    return total | {"seconds": round(time.monotonic() - began_s, 1), "files": files_of}


def versions() -> dict[str, str]:
    """What the tests ran on."""
    import torch
    import transformers
    import triton

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "device": torch.cuda.get_device_name(),
    }


def earlier_runs(path: Path) -> list[dict[str, Any]]:
    """The runs of a result that is of the same code."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    runs: list[dict[str, Any]] = [] if changed_files(found.get("tested", {})) else found["runs"]
    return runs


def committed_runs() -> list[dict[str, Any]]:
    """The runs of the committed result, of whatever code: how long a file takes changes little."""
    runs: list[dict[str, Any]] = json.loads(RESULT.read_text(encoding="utf-8"))["runs"] if RESULT.exists() else []
    return runs


def document_of(runs: list[dict[str, Any]], total: dict[str, int]) -> dict[str, Any]:
    """What is kept of some runs."""
    clean = [not run["failed"] for run in runs]
    in_a_row = next((i for i, fine in enumerate(reversed(clean)) if not fine), len(clean))
    return {
        "command": "make gpu-test" + (f" RUNS={len(runs)}" if len(runs) > 1 else ""),
        "versions": versions(),
        "clean_runs_in_a_row": in_a_row,
        **total,
        "tested": digests(),
        "runs": runs,
    }


def main() -> int:
    """Run everything as often as asked, write the result, and fail if any test did."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--runs", type=int, default=1, help="how many times in a row")
    arguments.add_argument("--processes", type=int, default=max(2, min(16, os.cpu_count() or 4)))
    arguments.add_argument("--out", type=Path, default=RESULT)
    arguments.add_argument("--more", action="store_true", help="add to the runs of the result, if it is of this code")
    arguments.add_argument("--only", default="", help="only files whose path has this in it; nothing is written")
    given = arguments.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.stderr.write("error: no CUDA device is here: run this on a machine with a GPU\n")
        return 2
    files = [path for path in test_files() if given.only in path.as_posix()]
    runs = earlier_runs(given.out) if given.more else []
    known = {each["file"]: each["seconds"] for run in runs or committed_runs() for each in run["files"]}
    files.sort(key=lambda path: -known.get(path.relative_to(ROOT).as_posix(), 1e9))
    for _ in range(given.runs):
        runs.append(one_run(files, given.processes))
        total = {name: sum(run[name] for run in runs) for name in ("passed", "failed", "skipped")}
        if not given.only:  # after every run: a limit of time that strikes later loses that one only
            given.out.write_text(json.dumps(document_of(runs, total), indent=2) + "\n", encoding="utf-8")
    seconds = ", ".join(f"{run['seconds']} s" for run in runs)
    sys.stdout.write("{passed} passed, {failed} failed, {skipped} skipped".format(**total) + f"\n({seconds})\n")
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
