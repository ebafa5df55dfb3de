"""Measures this machine for plans: memory, products of every format, disk, steps, and a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from hotset.analysis.planner.calibration import (
    Calibration,
    CpuFigures,
    load,
    machine_name,
    today,
)
from hotset.analysis.planner.measure_experts import measure_expert, memory_bytes_per_s
from hotset.analysis.planner.measure_gpu import measure_gpu
from hotset.analysis.planner.measure_reads import measure_disk, sample_file
from hotset.analysis.planner.measure_steps import step_rates
from hotset.analysis.planner.model import SPECS
from hotset.analysis.planner.rates import ExpertPoint, Matrices
from hotset.errors import FormatError

SHAPES: tuple[Matrices, ...] = (
    ((1536, 2048), (2048, 768)),
    ((5760, 2880), (2880, 2880)),
)
"""Experts of published models, that others are compared with: Qwen3-30B-A3B's and gpt-oss's."""


class Effort(NamedTuple):
    """How long to measure."""

    seconds: float  # for each figure
    tokens: int  # of each prompt


QUICK, THOROUGH = Effort(0.15, 24), Effort(0.6, 64)


class Subject(NamedTuple):
    """What of a model is measured, too: its experts' matrices, their bytes, and a file of its weights."""

    matrices: Matrices
    expert_bytes: int
    file: Path | None = None


def measurements(subject: Subject | None) -> int:
    """How often `measure` will call `advance`."""
    return len(_shapes(subject)) * len(SPECS) + 3 + (gpu_here() is not None)


def measure(
    where: Path,
    subject: Subject | None = None,
    effort: Effort = THOROUGH,
    *,
    advance: Callable[[], None] = lambda: None,
) -> Calibration:
    """Measure this machine, and the disk under a folder or that a model lies on; curves that were kept stay."""
    memory = memory_bytes_per_s(effort.seconds)
    advance()
    points = list(_points(_shapes(subject), effort, advance))
    with _file(where, subject) as path:
        disk = measure_disk(path, subject.expert_bytes if subject else 4 << 20, effort.seconds)
    advance()
    steps = step_rates(effort.tokens, effort.seconds)
    advance()
    gpu, device = None, gpu_here()
    if device is not None:
        gpu = measure_gpu(device, effort.seconds)
        advance()
    kept = load()
    cpu = CpuFigures(
        memory_bytes_per_s=memory,
        read_s=disk.read_s,
        disk_bytes_per_s=disk.bytes_per_s,
        busy=disk.busy,
        kept=disk.kept,
        threads=torch.get_num_threads(),
        **steps._asdict(),
    )
    curves = {} if kept is None else kept.curves
    return Calibration(machine_name(None if gpu is None else gpu.name), today(), cpu, points, gpu, curves)


def gpu_here() -> torch.device | None:
    """The GPU that models run on, if there is one."""
    return torch.device("cuda") if torch.cuda.is_available() else None


def _shapes(subject: Subject | None) -> Sequence[Matrices]:
    own = () if subject is None else (subject.matrices,)
    return tuple(dict.fromkeys((*SHAPES, *own)))


def _points(shapes: Sequence[Matrices], effort: Effort, advance: Callable[[], None]) -> Iterator[ExpertPoint]:
    for matrices in shapes:
        for precision in SPECS:
            try:
                yield measure_expert(precision, matrices, effort.seconds)
            except FormatError:  # these matrices are not of whole groups
                continue
            finally:
                advance()


@contextmanager
def _file(where: Path, subject: Subject | None) -> Iterator[Path]:
    """The file to read: a model's own where it is large enough, else a temporary one."""
    if subject is not None and subject.file is not None and subject.file.stat().st_size >= 16 * subject.expert_bytes:
        yield subject.file
        return
    with sample_file(where) as path:
        yield path
