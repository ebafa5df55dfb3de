"""What the GPU tests cover, by a digest of each file: `make test` says when the committed result is of others."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "gpu_tests.json"
SOURCES = (
    "cache", "engine", "forecasts", "formats", "models", "policies", "prefetch", "store", "transfer",
)  # fmt: skip
"""The packages that take part when a model runs on a GPU."""
TESTS = (
    "tests/gpu/conftest.py",
    "tests/gpu/format_runs.py",
    "tests/gpu/gpu_commands.py",
    "tests/gpu/test_*.py",
    "tests/engine/device/*.py",
    "tests/engine/kernels/*.py",
    "tests/engine/test_gpu_engine.py",
    "tests/support/*.py",
)

CPU_ONLY = {
    "compile_kernels.py", "compile_plans.py", "test_compiled_kernels.py", "test_compiled_plans.py",
    "test_packed_rows.py", "test_row_bits.py", "test_vector_widths.py",
}  # fmt: skip
"""Files in those folders that run on no GPU."""

_MOST_NAMED = 3


def covered_files() -> list[Path]:
    """The sources that decide what runs on a GPU, and the tests of it."""
    sources = [path for name in SOURCES for path in (ROOT / "src" / "hotset" / name).rglob("*.py")]
    tests = {path for pattern in TESTS for path in ROOT.glob(pattern) if path.name not in CPU_ONLY}
    return sorted({*sources, *tests})


def test_files() -> list[Path]:
    """The files whose tests need, or use, a GPU."""
    found = {path for pattern in TESTS for path in ROOT.glob(pattern) if path.name.startswith("test_")}
    return sorted(path for path in found if path.name not in CPU_ONLY)


def digests() -> dict[str, str]:
    """A digest of the code of each covered file: comments and docstrings run on no GPU."""
    code = {path.relative_to(ROOT).as_posix(): code_of(path.read_text(encoding="utf-8")) for path in covered_files()}
    return {name: hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for name, text in code.items()}


def changed_files(tested: dict[str, str]) -> list[str]:
    """The covered files that are new, gone, or other than they were when they were tested."""
    today = digests()
    names = {name for name in {*today, *tested} if Path(name).name not in CPU_ONLY}
    return sorted(name for name in names if today.get(name) != tested.get(name))


def code_of(source: str) -> str:
    """The lines of a module without comments, docstrings and empty lines; the same under every version of Python."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def complaint() -> str | None:
    """What is wrong with the committed result, in a line; None if it is of today's sources and without a failure."""
    try:
        result = json.loads(RESULT.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"there is no {RESULT.relative_to(ROOT)}"
    if changed := changed_files(result["tested"]):
        more = f" and {len(changed) - _MOST_NAMED} more" if len(changed) > _MOST_NAMED else ""
        return f"{', '.join(changed[:_MOST_NAMED])}{more} changed since the last tests on one"
    if result["failed"] or result["clean_runs_in_a_row"] < 3:
        return "the last tests on a GPU were not three runs without a failure"
    return None


if __name__ == "__main__":
    if (line := complaint()) is not None:
        sys.stderr.write(f"*** GPU TESTS ARE STALE: {line}: run `make gpu-test` on a machine with a GPU ***\n")
