"""Files in fast.txt, which `make test-fast` runs, and in slow.txt exist; every package has a fast one that uses it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hotset

ROOT = Path(__file__).parents[1]
FILES = (ROOT / "tests" / "fast.txt").read_text().split()
PACKAGES = sorted(path.parent.name for path in Path(hotset.__file__).parent.glob("*/__init__.py"))


SLOW = (ROOT / "tests" / "slow.txt").read_text().split()


@pytest.mark.parametrize("name", [*FILES, *SLOW])
def test_a_file_that_is_named_exists(name: str) -> None:
    assert (ROOT / name).is_file()


def test_a_file_is_named_once() -> None:
    assert len(FILES) == len(set(FILES))
    assert len(SLOW) == len(set(SLOW))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_a_fast_test(package: str) -> None:
    used = re.compile(rf"from hotset(\.{package}\b| import .*\b{package}\b)")
    mine = [name for name in FILES if f"tests/{package}/" in name or used.search((ROOT / name).read_text())]
    assert mine, f"add a quick test of hotset.{package} to tests/fast.txt"
