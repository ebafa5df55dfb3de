"""How long `import hotset` takes, and how fast the digest is by which a packed store knows its experts again."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from hotset.store.digest import digest_of

from common import best_of, publish

ROUNDS = 9
BLOCK_BYTES = 64 << 20


def seconds(code: str) -> float:
    """The best time of a fresh interpreter that runs one line."""
    return best_of(ROUNDS, lambda: subprocess.run([sys.executable, "-c", code], check=True))


def digest_bytes_per_s() -> float:
    """How fast one thread computes the digest of an expert."""
    block = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, np.uint8)
    return BLOCK_BYTES / best_of(ROUNDS, lambda: digest_of(block))


def main() -> None:
    """Measure, print and publish."""
    bare, package = seconds("pass"), seconds("import hotset")
    digest = digest_bytes_per_s()
    print(f"import hotset: {(package - bare) * 1e3:.1f} ms beyond a bare interpreter ({bare * 1e3:.1f} ms)")
    print(f"digest: {digest / 1e9:.2f} GB/s; slower than 0.5 would hold up the disks that hotset is for")
    publish(
        "import_time",
        {
            "bare_interpreter_s": round(bare, 4),
            "import_s": round(package - bare, 4),
            "digest_gb_per_s": round(digest / 1e9, 2),
        },
    )


if __name__ == "__main__":
    main()
