"""`make test-fast` runs the files named in fast.txt: all of them exist, and every package has one that uses it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hotset

ROOT = Path(__file__).parents[1]
FILES = (ROOT / "tests" / "fast.txt").read_text().split()
PACKAGES = sorted(path.parent.name for path in Path(hotset.__file__).parent.glob("*/__init__.py"))


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_fast_tests_exists(name: str) -> None:
    assert (ROOT / name).is_file()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_a_fast_test(package: str) -> None:
    used = re.compile(rf"from hotset(\.{package}\b| import .*\b{package}\b)")
    mine = [name for name in FILES if f"tests/{package}/" in name or used.search((ROOT / name).read_text())]
    assert mine, f"add a quick test of hotset.{package} to tests/fast.txt"
