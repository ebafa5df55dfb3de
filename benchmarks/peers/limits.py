"""Run a command under a hard memory limit, with cold files and a chosen read-ahead; Linux, cgroup v1, root.

Example: python limits.py --limit 1366 --read-ahead 128 --evict model.gguf -- python llamacpp.py --model model
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GROUPS = Path("/sys/fs/cgroup/memory")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Outcome:
    """How a command ended under its limit; `others_cores` says how busy the machine was with anything else."""

    returncode: int
    oom_killed: bool
    seconds: float
    others_cores: float
    max_usage_bytes: int
    limit_hits: int
    stat: dict[str, int]
    result: dict[str, Any] | None
    stderr_tail: str


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A group of processes that together may not hold more, page cache included; removed at the end."""
    group = GROUPS / f"hotset-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield group
    finally:
        (group / "memory.force_empty").write_text("0")
        group.rmdir()


@contextmanager
def read_ahead(path: Path, kib: int | None) -> Iterator[int]:
    """Set the read-ahead of the device that holds `path`, for the whole machine, and put the old one back."""
    setting = _read_ahead_file(path)
    before = setting.read_text()
    # Python dies of a SIGTERM (`timeout` sends one) without running `finally`; nothing helps against SIGKILL.
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if kib is not None:
            setting.write_text(str(kib))
        yield int(setting.read_text())
    finally:
        setting.write_text(before)
        signal.signal(signal.SIGTERM, handler)


def _read_ahead_file(path: Path) -> Path:
    device = path.stat().st_dev
    found = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    # A partition has no queue of its own: it is its disk's.
    return next(folder / "queue" / "read_ahead_kb" for folder in (found, found.parent) if (folder / "queue").exists())


def evict(paths: list[Path]) -> None:
    """Drop files, and all files of folders, from the page cache: a cached page is free to whoever did not read it."""
    for path in (file for given in paths for file in ([given], given.rglob("*"))[given.is_dir()] if file.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # a dirty page stays
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(command: list[str], limit_bytes: int, timeout_s: float = 600.0) -> Outcome:
    """Run a command that prints one line of JSON last, alone in a group of this limit."""
    with memory_group(limit_bytes) as group:
        inside = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
        began, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds()
        with subprocess.Popen(inside, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except BaseException as error:
                process.kill()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                out, err = process.communicate()
        seconds = time.perf_counter() - began
        others = (_busy_seconds() - busy - (_own_seconds() - own)) / seconds
        return Outcome(
            process.returncode,
            _pairs(group / "memory.oom_control").get("oom_kill", 0) > 0,
            seconds,
            max(others, 0.0),
            int((group / "memory.max_usage_in_bytes").read_text()),
            int((group / "memory.failcnt").read_text()),
            _pairs(group / "memory.stat"),
            _last_json(out),
            err[-2000:] if process.returncode else "",
        )


def _busy_seconds() -> float:
    """CPU time that the whole machine has spent on work so far."""
    user, nice, system, _idle, _wait, irq, soft, *_ = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + soft) / TICKS


def _own_seconds() -> float:
    return sum(os.times()[:4])  # this process and the children it has waited for


def _pairs(path: Path) -> dict[str, int]:
    return {key: int(value) for key, value in (line.split() for line in path.read_text().splitlines())}


def _last_json(text: str) -> dict[str, Any] | None:
    return next((json.loads(line) for line in reversed(text.splitlines()) if line.startswith("{")), None)


def main() -> None:
    """Parse, run, print the outcome as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, required=True, help="MiB")
    parser.add_argument("--read-ahead", type=int, help="KiB; by default as found")
    parser.add_argument(
        "--evict", type=Path, nargs="*", default=[], help="files or folders; the first one's disk is set"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    where = options.evict[0] if options.evict else Path("/tmp")  # noqa: S108
    with read_ahead(where, options.read_ahead) as kib:
        evict(options.evict)
        outcome = run(options.command[options.command[:1] == ["--"] :], options.limit << 20)
    print(json.dumps({"read_ahead_kib": kib, "limit_bytes": options.limit << 20, **asdict(outcome)}))


if __name__ == "__main__":
    main()
