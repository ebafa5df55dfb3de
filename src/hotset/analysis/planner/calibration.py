"""What `hotset doctor --measure` found out about this machine: one JSON file that is kept for plans."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hotset.analysis.planner.hits import HitCurve
from hotset.analysis.planner.rates import MANY_TOKENS, Engine, ExpertPoint, Rates, gpu_rates, weights_of
from hotset.errors import HotsetError
from hotset.files import write_beside
from hotset.profile.folder import folder as profiles
from hotset.shape import ModelShape

VERSION = 1
NAME = "calibration.json"
MAX_BYTES = 16 << 20
MAX_CURVES = 32
SPREAD = 0.1
"""How far a token's time may be off by what this calibration does not know."""


@dataclass(frozen=True, kw_only=True)
class CpuFigures:
    """What was measured of the processor, its memory and its disk."""

    memory_bytes_per_s: float
    layer_s: float
    event_s: float
    partial_s: float
    miss_s: float
    read_s: float
    disk_bytes_per_s: float
    busy: float
    kept: float
    threads: int


@dataclass(frozen=True, kw_only=True)
class GpuFigures:
    """The rates of a GPU and its link; times of layers are those of another one, unless they are known."""

    name: str
    memory_bytes_per_s: float
    link_bytes_per_s: float
    layer_s: float | None  # driven by the device
    host_layer_s: float | None
    expert_bytes_per_s: float | None = None  # read by torch's products of one token with plain experts


@dataclass(frozen=True)
class Calibration:
    """A machine's figures, and the hits of shapes that were planned for."""

    machine: str
    date: str
    cpu: CpuFigures
    experts: Sequence[ExpertPoint]
    gpu: GpuFigures | None = None
    curves: dict[str, dict[str, Any]] = field(default_factory=dict)  # by shape

    def rates(self) -> Rates:
        """What the CPU of this machine does."""
        cpu = self.cpu
        plain = [point for point in self.experts if point.precision == "bfloat16"]
        largest = max(plain, key=lambda point: point.expert_bytes, default=None)
        flops = math.inf if largest is None else _flops_per_s(largest)
        return Rates(
            engine=Engine.CPU,
            memory_bytes_per_s=cpu.memory_bytes_per_s,
            rest_bytes_per_s=cpu.memory_bytes_per_s if largest is None else largest.bytes_per_s,
            layer_s=cpu.layer_s,
            event_s=cpu.event_s,
            partial_s=cpu.partial_s,
            miss_s=cpu.miss_s,
            read_s=cpu.read_s,
            miss_bytes_per_s=cpu.disk_bytes_per_s,
            kept=cpu.kept,
            busy=cpu.busy,
            flops_per_s=flops,
            experts=tuple(self.experts),
            efficiency={},
            spread=SPREAD,
            source=f"measured here, {self.date}",
        )

    def gpu_rates(self, *, host: bool) -> Rates:
        """What the GPU of this machine does."""
        if self.gpu is None:
            raise HotsetError("the rates of a GPU are not measured: give --memory-bandwidth and --link")
        gpu = self.gpu
        return gpu_rates(
            gpu.memory_bytes_per_s, gpu.link_bytes_per_s, self.cpu.disk_bytes_per_s, host=host, layer_s=gpu.layer_s,
            host_layer_s=gpu.host_layer_s, expert_bytes_per_s=gpu.expert_bytes_per_s,
            source=f"measured here, {self.date}",
        )  # fmt: skip

    def curve(self, shape: ModelShape) -> HitCurve | None:
        """The hits of a shape, if they were kept."""
        kept = self.curves.get(_key(shape))
        return None if kept is None else HitCurve.from_dict(kept)

    def with_curve(self, curve: HitCurve) -> Calibration:
        """The same with the hits of a shape; the oldest make way."""
        others = {key: kept for key, kept in self.curves.items() if key != _key(curve.shape)}
        kept = dict(list(others.items())[1 - MAX_CURVES :])
        return replace(self, curves=kept | {_key(curve.shape): curve.as_dict()})

    def as_dict(self) -> dict[str, Any]:
        """The file's contents."""
        return {
            "version": VERSION, "machine": self.machine, "date": self.date,
            "cpu": asdict(self.cpu), "gpu": None if self.gpu is None else asdict(self.gpu),
            "experts": [point._asdict() for point in self.experts], "curves": self.curves,
        }  # fmt: skip


def path() -> Path:
    """Where the calibration lies: beside named profiles, by the XDG rules."""
    return profiles().parent / NAME


def machine_name(gpu: str | None = None) -> str:
    """What this machine is called, so that no other's figures are taken for its own."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    return ", ".join(each for each in (f"{processor} x {os.cpu_count()}", gpu) if each)


def save(calibration: Calibration) -> Path:
    """Keep a calibration, whole or not at all."""
    target = path()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HotsetError(f"cannot make {target.parent} ({error.strerror}): set XDG_DATA_HOME to another") from error
    with write_beside(target) as scratch:
        scratch.write_text(json.dumps(calibration.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return target


def load(gpu: str | None = None) -> Calibration | None:
    """The kept calibration of this machine; none if there is none, or it is another machine's or version's."""
    try:
        with path().open("rb") as file:
            document = json.loads(file.read(MAX_BYTES))
        found = read_document(document)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, HotsetError):
        return None  # it is measured anew: nothing that a person made is lost
    same = {machine_name(), machine_name(gpu), machine_name(found.gpu.name if found.gpu else None)}
    return found if found.machine in same and found.machine.startswith(machine_name()) else None


def read_document(document: dict[str, Any]) -> Calibration:
    """A calibration of the contents of its file; impossible ones are refused."""
    if document["version"] != VERSION:
        raise HotsetError("a calibration of another version")
    cpu = CpuFigures(**document["cpu"])
    numbers = [value for value in asdict(cpu).values() if isinstance(value, int | float)]
    gpu = None if document["gpu"] is None else GpuFigures(**document["gpu"])
    points = [
        ExpertPoint(each["precision"], _matrices(each["matrices"]), int(each["expert_bytes"]), each["one_s"],
                    each["many_s"], each.get("few_s"))
        for each in document["experts"]
    ]  # fmt: skip
    positive = [cpu.memory_bytes_per_s, cpu.disk_bytes_per_s, cpu.layer_s, cpu.busy, cpu.kept]
    positive += [value for value in asdict(gpu).values() if isinstance(value, int | float)] if gpu else []
    if not points or min(positive) <= 0 or min(numbers) < 0 or not all(_possible(p) for p in points):
        raise HotsetError("a calibration with impossible figures")
    return Calibration(document["machine"], document["date"], cpu, points, gpu, dict(document["curves"]))


def _matrices(listed: list[list[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((int(outputs), int(inputs)) for outputs, inputs in listed)


def _possible(point: ExpertPoint) -> bool:
    return min(point.one_s, point.many_s, 1.0 if point.few_s is None else point.few_s) > 0


def today() -> str:
    """The date that a calibration is of."""
    return datetime.now(UTC).date().isoformat()


def _flops_per_s(point: ExpertPoint) -> float:
    return 2 * weights_of(point.matrices) * MANY_TOKENS / point.many_s


def _key(shape: ModelShape) -> str:
    return f"{shape.layers}x{shape.experts}x{shape.top_k}"
