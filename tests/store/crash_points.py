"""Kills a pack at every system call that changes something, in turn, and sees whether it can always be finished.

``python crash_points.py FOLDER`` prints how many such calls there are; a pack that cannot be finished, or comes out
other than an undisturbed one, ends the script.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from store_samples import content, plan_of, write_pack

from hotset.store import pack
from hotset.store.packed import is_packed, open_packed

CALLS = ("pwrite", "fsync", "rename", "replace", "ftruncate", "unlink", "mkdir", "open")


def deadly(original: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    def call(*words: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*words, **more)

    return call


def arm(countdown: int) -> None:
    left = [countdown]
    for name in CALLS:
        setattr(os, name, deadly(getattr(os, name), left))
    pack._pwrite = os.pwrite


def survives(out: Path, countdown: int) -> bool:
    """Pack in a process of its own that dies at the given call; false if it died."""
    child = os.fork()
    if child == 0:
        arm(countdown)
        finish(out)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def finish(out: Path) -> None:
    if not out.exists():
        write_pack(out, plan_of((2, 3)))
    pack.tidy(out)


def main() -> None:
    folder, dice = Path(sys.argv[1]), random.Random(0)  # noqa: S311
    pack.COMMIT_BYTES = 10_000  # two or three blocks
    finish(folder / "undisturbed")
    expected = content(folder / "undisturbed")
    countdown, died = 1, True
    while died:
        out = folder / "pack"
        died = not survives(out, countdown)
        survives(out, dice.randint(1, 40))  # and once more, elsewhere
        if out.exists():
            open_packed(out)  # what has its final name is complete at any time
        finish(out)
        assert is_packed(out)
        assert content(out) == expected, f"another pack after a kill at call {countdown}"
        assert not (folder / "pack.part").exists()
        shutil.rmtree(out)
        countdown += 1
    print(countdown - 2)


if __name__ == "__main__":
    main()
