"""What the wheel holds stays within a size that was decided on, and grows by nobody's oversight."""

from __future__ import annotations

import zlib
from pathlib import Path

import hotset

PACKAGE = Path(hotset.__file__).parent
MOST_BYTES = 40_500_000
"""The reference model has 26 MB of it, the recorded traces 12.5: docs/log.md says why they are in the wheel."""


def test_the_wheel_does_not_grow_unnoticed() -> None:
    sizes = {
        str(file.relative_to(PACKAGE)): len(zlib.compress(file.read_bytes()))
        for file in PACKAGE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    assert sum(sizes.values()) < MOST_BYTES, f"more than was decided on; the largest files: {largest}"
