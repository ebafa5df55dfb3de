"""What goes into the build context of the image: all that its Dockerfile copies, and nothing large or private."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RULES = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]


def is_sent(path: str) -> bool:
    """Whether Docker sends a file: of the rules that it, or a folder it is in, agrees with, the last one decides."""
    parts = path.split("/")
    names = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    sent = True
    for rule in RULES:
        pattern = rule.removeprefix("!")
        candidates = parts if pattern.startswith("**/") else names
        if any(fnmatch(each, pattern.removeprefix("**/")) for each in candidates):
            sent = rule.startswith("!")
    return sent


def test_all_that_is_copied_is_sent() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    names = " ".join(copied).split()
    assert {"pyproject.toml", "src"} <= set(names)
    assert all((ROOT / name.removeprefix("./")).exists() and is_sent(name.removeprefix("./")) for name in names)
    assert is_sent("src/hotset/reference/model/config.json")


@pytest.mark.parametrize(
    "path",
    [
        ".git/config", ".venv/bin/python", ".mypy_cache/x", ".hypothesis/x", "dist/hotset.whl", "tests/conftest.py",
        "src/hotset/__pycache__/ahead.cpython-312.pyc", "src/hotset.egg-info/PKG-INFO", "benchmarks/common.py",
    ],
)  # fmt: skip
def test_caches_environments_and_git_are_not(path: str) -> None:
    assert not is_sent(path)
