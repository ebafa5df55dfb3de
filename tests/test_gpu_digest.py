"""The committed result of the GPU tests is known to be of other sources when it is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

COVERED = Path(__file__).parent / "gpu" / "covered.py"


@pytest.fixture
def covered(tmp_path: Path) -> ModuleType:
    """The module, looking at a tree of its own."""
    spec = importlib.util.spec_from_file_location("covered", COVERED)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ROOT, module.RESULT = tmp_path, tmp_path / "gpu_tests.json"
    for name in ("engine/a.py", "cli/b.py"):
        path = tmp_path / "src" / "hotset" / name
        path.parent.mkdir(parents=True)
        path.write_text("x = 1\n")
    return module


def write(covered: Any, **changes: Any) -> None:
    fine = {"tested": covered.digests(), "failed": 0, "clean_runs_in_a_row": 3}
    covered.RESULT.write_text(json.dumps(fine | changes))


def test_a_result_of_today_is_fine_and_one_of_other_sources_is_not(covered: Any, tmp_path: Path) -> None:
    assert "there is no" in covered.complaint()
    write(covered)
    assert covered.complaint() is None
    (tmp_path / "src/hotset/cli/b.py").write_text("x = 2\n")  # runs on no GPU
    assert covered.complaint() is None
    (tmp_path / "src/hotset/engine/a.py").write_text("x = 2\n")
    assert "src/hotset/engine/a.py changed since" in covered.complaint()
    write(covered)
    (tmp_path / "src/hotset/engine/a.py").rename(tmp_path / "src/hotset/engine/c.py")
    assert "src/hotset/engine/a.py, src/hotset/engine/c.py changed since" in covered.complaint()
    for name in "defg":
        (tmp_path / f"src/hotset/engine/{name}.py").write_text("x = 2\n")
    assert "and 3 more changed since" in covered.complaint()


@pytest.mark.parametrize("changes", [{"failed": 1}, {"clean_runs_in_a_row": 2}])
def test_failures_and_too_few_runs_are_told(covered: Any, changes: dict[str, int]) -> None:
    write(covered, **changes)
    assert "three runs without a failure" in covered.complaint()


def test_the_command_says_it_in_one_loud_line_or_not_at_all() -> None:
    done = subprocess.run([sys.executable, COVERED], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr == "" or (done.stderr.startswith("***") and done.stderr.count("\n") == 1)


def test_comments_and_docstrings_do_not_count(covered: Any) -> None:
    plain = 'def f(x):\n    text = """kept\n# kept, too"""\n    return x, text\n'
    told = plain.replace("def f(x):\n", '"""A module."""\n\ndef f(x):  # why\n    """One\n    sentence."""\n')
    assert covered.code_of(told) == covered.code_of(plain)
    assert covered.code_of(plain.replace("return x", "return -x")) != covered.code_of(plain)
    assert covered.code_of(plain.replace("kept\n", "lost\n")) != covered.code_of(plain)
