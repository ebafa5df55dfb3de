"""How the kernels cut up their work: timed once per device and shape, and remembered in the user's cache folder."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.errors import TritonError

BUCKETS = (1, 4, 8)
"""Numbers of tokens that are tuned for; others use the next one."""
ROUNDS = 5
VERSION = 2
"""Of the kernels: what was measured with others does not count."""
GROUP = 8


class Choice(NamedTuple):
    """The size of a program's block, its warps, and how far it loads ahead: through shared memory, or in one go."""

    block_n: int
    block_k: int
    warps: int
    stages: int = 1
    unroll: int = 1


class Problem(NamedTuple):
    """What a kernel has to do, as far as its speed depends on it."""

    kernel: str  # "up" or "down"
    n: int
    k: int
    dtype: str
    transposed: bool
    gated: bool  # two columns of the matrix for every column of the result
    group: int  # matrices that one program multiplies side by side
    pairs: int

    @property
    def key(self) -> str:
        """Its name in the file."""
        words = [f"v{VERSION}", f"triton {triton.__version__}", *self]
        return " ".join(str(word) for word in words)


Trial = Callable[[Choice], None]

# Matrices by rows: 32 lanes with 16 bytes each are 256 numbers of two bytes, and with that much depth to every warp the
# input lies in the threads that need it. A single warp waits for no other. Matrices by columns: while the input of
# a step is fewer numbers than there are threads, each loads what it needs, without an exchange through shared memory.
_LISTS = {
    ("up", False): [
        Choice(2, 1024, 4, 1, 2), Choice(4, 1024, 4), Choice(1, 1024, 4, 1, 2), Choice(2, 256, 1, 1, 2),
        Choice(4, 256, 1), Choice(2, 512, 1), Choice(1, 1024, 1), Choice(4, 512, 2),
    ],
    ("up", True): [
        Choice(16, 64, 8, 1, 4), Choice(32, 64, 8, 1, 2), Choice(32, 64, 8, 1, 4), Choice(16, 128, 8, 1, 2),
        Choice(32, 128, 8, 1, 2), Choice(16, 64, 4, 1, 4), Choice(64, 32, 8, 1, 4), Choice(32, 64, 8, 3),
    ],
    ("down", False): [
        Choice(1, 256, 1), Choice(1, 256, 1, 1, 3), Choice(2, 256, 1), Choice(1, 512, 2), Choice(1, 1024, 4),
        Choice(2, 1024, 4),
    ],
    ("down", True): [
        Choice(32, 16, 8, 1, 4), Choice(32, 16, 8, 1, 2), Choice(16, 16, 8, 1, 4), Choice(64, 16, 8, 1, 2),
        Choice(32, 32, 16, 1, 2), Choice(16, 32, 16, 1, 4), Choice(32, 32, 8, 3),
    ],
    # By units: rows, threads along each of them, warps. A row is a warp's, or in the second kernel an expert's.
    ("up units", False): [
        Choice(4, 32, 4), Choice(1, 32, 1), Choice(2, 32, 1), Choice(2, 32, 2), Choice(8, 32, 4), Choice(8, 32, 8),
    ],
    ("down units", False): [
        Choice(2, 32, 4), Choice(4, 32, 4), Choice(2, 32, 2), Choice(2, 16, 4), Choice(4, 16, 4), Choice(2, 8, 2),
    ],
}  # fmt: skip
UNIT_ROUNDS = 4
"""Units that a thread has under way of each row, at most."""

_remembered: dict[tuple[str, str], Choice] = {}


def bucket(tokens: int) -> int:
    """The number of tokens that these are tuned as."""
    return next((size for size in BUCKETS if tokens <= size), BUCKETS[-1])


def candidates(problem: Problem) -> list[Choice]:
    """What is worth a try, the default first."""
    listed = _LISTS[problem.kernel, problem.transposed]
    return list(dict.fromkeys(_fitted(problem, choice) for choice in listed))


def default(problem: Problem) -> Choice:
    """What is good without a measurement."""
    return candidates(problem)[0]


def _fitted(problem: Problem, choice: Choice) -> Choice:
    """A listed choice for this size: the lists are made for gates, for eight pairs and for large matrices."""
    if problem.kernel.endswith("units"):
        return _fitted_units(problem, choice)
    block_n, block_k, *rest = choice
    if problem.kernel == "up" and not problem.gated:
        block_n *= 2
    if problem.kernel == "down":
        times = GROUP // problem.group
        block_n, block_k = (block_n, min(block_k * times, 128)) if problem.transposed else (block_n * times, block_k)
    room = triton.next_power_of_2(problem.n), max(triton.next_power_of_2(problem.k), 16)
    return Choice(min(block_n, room[0]), min(block_k, room[1]), *rest)


def _fitted_units(problem: Problem, choice: Choice) -> Choice:
    """A listed choice for rows of so many units: no more threads than there are, and loads in rounds of equal size."""
    lanes = min(choice.block_k, max(triton.next_power_of_2(problem.k), 8))
    beside = problem.group if problem.kernel.startswith("down") else choice.block_n
    rows = choice.block_n if problem.kernel.startswith("down") else max(choice.block_n, 32 // lanes)
    chunks = -(-problem.k // lanes)
    unroll = -(-chunks // -(-chunks // UNIT_ROUNDS))
    return Choice(rows, lanes, max(min(choice.warps, beside * lanes // 32), 1), 1, unroll)


def chosen(problem: Problem, trial: Trial, device: torch.device) -> Choice:
    """The fastest candidate: remembered, or timed now; the default where there is nothing to time with.

    `trial` launches the kernel some times, each time on other rows.
    """
    if not _is_tuned(device):
        return default(problem)
    name = torch.cuda.get_device_name(device)
    found = _known(name, problem)
    if found is None:
        found = _fastest(problem, trial)
        _write(name, problem.key, found)
    _remembered[name, problem.key] = found
    return found


def remembered(problem: Problem, device: torch.device) -> Choice:
    """The fastest candidate where it was timed before, else the default."""
    found = _known(torch.cuda.get_device_name(device), problem) if _is_tuned(device) else None
    return found or default(problem)


def _is_tuned(device: torch.device) -> bool:
    return device.type == "cuda" and os.environ.get("HOTSET_TUNE") != "0"


def _known(name: str, problem: Problem) -> Choice | None:
    return _remembered.get((name, problem.key)) or _read().get(name, {}).get(problem.key)


def _fastest(problem: Problem, trial: Trial) -> Choice:
    times = {choice: _milliseconds(trial, choice) for choice in candidates(problem)}
    return min(times, key=lambda choice: times[choice])


def _milliseconds(trial: Trial, choice: Choice) -> float:
    """The time of a trial on the device alone: in a graph, since the host launches more slowly than kernels run."""
    make: Any = torch.cuda.Event
    try:
        trial(choice)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            trial(choice)
    except (TritonError, RuntimeError):
        return float("inf")  # more registers or shared memory than this device has
    times = []
    for _ in range(1 + ROUNDS):
        began, ended = make(enable_timing=True), make(enable_timing=True)
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return float(min(times[1:]))


def path() -> Path:
    """The file of what was measured, by the XDG rules."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if home and Path(home).is_absolute() else Path(os.path.expanduser("~")) / ".cache"
    return base / "hotset" / "kernels.json"


def _read() -> dict[str, dict[str, Choice]]:
    """All that was measured, by device and problem; what is damaged counts for nothing."""
    try:
        stored = json.loads(path().read_text())
        return {
            name: {key: Choice(*numbers) for key, numbers in of_device.items() if _is_choice(numbers)}
            for name, of_device in stored.items()
        }
    except (OSError, ValueError, AttributeError):
        return {}


def _is_choice(numbers: Any) -> bool:
    right = isinstance(numbers, list) and len(numbers) == len(Choice._fields)
    return right and all(isinstance(number, int) and number > 0 for number in numbers)


def _write(name: str, key: str, choice: Choice) -> None:
    """Add a choice to the file, beside it and then in its place; a folder that takes no files is no reason to stop."""
    known = _read()
    known.setdefault(name, {})[key] = choice
    try:
        path().parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(prefix=".kernels.", dir=path().parent)
        with os.fdopen(handle, "w") as file:
            json.dump(known, file, indent=1)
        os.replace(scratch, path())
    except OSError:
        return
