"""Which lines of src/ the tests run, package by package, by coverage.py in all processes that the tests start.

``python benchmarks/line_coverage.py --out FILE [--tree CHECKOUT] [--workers N]`` measures this checkout or another one;
what follows ``--`` is handed to pytest. Code that Numba or Triton compiles runs outside of Python and is not seen: its
lines count as not run, in every version alike. A GPU is hidden, so that every machine runs the same tests.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WARNINGS = "no-data-collected,module-not-imported,module-not-measured,couldnt-parse,no-sysmon,already-imported"
START = """import sys
sys.path += {packages!r}
import coverage
coverage.process_startup()
"""
SETTINGS = """[run]
source = {source}
data_file = {data}
parallel = true
sigterm = true
patch = _exit, fork
disable_warnings = {warnings}
"""


def environment(tree: Path, folder: Path, packages: list[str]) -> dict[str, str]:
    """What makes every Python process that is started from here measure itself."""
    start, settings = folder / "start", folder / "settings"
    start.mkdir()
    (start / "sitecustomize.py").write_text(START.format(packages=packages))
    settings.write_text(SETTINGS.format(source=tree / "src" / "hotset", data=folder / "data", warnings=WARNINGS))
    own = {
        "COVERAGE_PROCESS_START": str(settings),
        "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(start)]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    if sys.version_info >= (3, 12):
        own["COVERAGE_CORE"] = "sysmon"  # lines cost next to nothing once they have been seen
    return os.environ | own


def tests(tree: Path, workers: int, own: dict[str, str], more: list[str]) -> str:
    """Run the tests of a checkout, and return their last line."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=-q --strict-markers"]
    command += [f"--numprocesses={workers}", "--dist=worksteal", *more]
    with subprocess.Popen(command, cwd=tree, env=own, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None  # noqa: S101
        last = ""
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            last = line.strip() or last
    return last


def share(lines: tuple[int, int]) -> dict[str, Any]:
    """Lines that were run, of how many, as a share."""
    run, all_of_them = lines
    return {"lines": all_of_them, "run": run, "percent": round(100 * run / max(1, all_of_them), 2)}


def figures(folder: Path, tree: Path) -> dict[str, Any]:
    """Lines run and lines there are, per package and together."""
    import coverage

    measured = coverage.Coverage(data_file=str(folder / "data"), config_file=str(folder / "settings"))
    measured.combine([str(folder)], strict=True)
    report = folder / "report.json"
    measured.json_report(outfile=str(report), ignore_errors=True)
    packages: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for name, found in json.loads(report.read_text())["files"].items():
        inner = (tree / name).resolve().relative_to(tree / "src" / "hotset")
        key = inner.parts[0] if len(inner.parts) > 1 else "hotset"
        summary = found["summary"]
        run, there = packages[key]
        packages[key] = (run + summary["covered_lines"], there + summary["num_statements"])
    total = (sum(run for run, _ in packages.values()), sum(there for _, there in packages.values()))
    return {"total": share(total), "packages": {name: share(packages[name]) for name in sorted(packages)}}


def main() -> None:
    """Run the tests of one checkout and write the shares."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    arguments.add_argument("--tree", type=Path, default=ROOT, help="the checkout to measure")
    arguments.add_argument("--workers", type=int, default=os.cpu_count() or 2)
    arguments.add_argument("--packages", action="append", default=[], help="a folder of packages that are missing here")
    arguments.add_argument("--commit", default="", help="what the checkout is of, for the record")
    arguments.add_argument("pytest", nargs="*", help="handed to pytest")
    given = arguments.parse_args()
    tree, packages = given.tree.resolve(), [str(Path(each).resolve()) for each in given.packages]
    sys.path += packages
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="coverage-") as folder:
        own = environment(tree, Path(folder), packages)
        last = tests(tree, given.workers, own, given.pytest)
        result = figures(Path(folder), tree)
    document = {
        "benchmark": "line_coverage",
        "commit": given.commit,
        "tests": last,
        "seconds": round(time.monotonic() - began_s, 1),
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "coverage": version("coverage"),
        **result,
    }
    given.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    for name, found in result["packages"].items():
        sys.stdout.write(f"{name:12} {found['percent']:6.2f} % of {found['lines']}\n")
    sys.stdout.write(f"{'together':12} {result['total']['percent']:6.2f} % of {result['total']['lines']}\n")


if __name__ == "__main__":
    main()
