"""What a machine does per second: measured on it, or told of one that is not there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

Matrices = tuple[tuple[int, int], ...]
MANY_TOKENS = 64
"""The tokens of one expert at which the time for many is measured."""
FEW_TOKENS = 8
"""Up to so many tokens are multiplied with packed matrices, as `engine/kernels/packed.py` has it."""


class Engine(StrEnum):
    """What computes, and what brings missing experts."""

    CPU = "cpu"  # experts in RAM, misses from disk
    DEVICE = "device"  # a GPU that drives itself, misses from RAM
    HOST = "host"  # a GPU that the host drives, misses from RAM and disk


class ExpertPoint(NamedTuple):
    """The measured time of one expert of some matrices."""

    precision: str
    matrices: Matrices
    expert_bytes: int
    one_s: float  # with one token, among the other experts of an event
    many_s: float  # with `MANY_TOKENS`
    few_s: float | None = None  # with `FEW_TOKENS`; calibrations of before it was measured do not have it

    @property
    def bytes_per_s(self) -> float:
        """What it reads per second with one token."""
        return self.expert_bytes / self.one_s


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The times of one engine on one machine; docs/guide/plan.md has the model that they enter."""

    engine: Engine
    memory_bytes_per_s: float  # reads of the memory that computes
    rest_bytes_per_s: float  # weights that are no experts
    layer_s: float  # of each layer beside its experts and the reading of weights
    event_s: float = 0.0  # of each event beside its experts
    partial_s: float = 0.0  # of each event more, where some experts are not resident
    miss_s: float = 0.0  # of each missing expert beside its bytes
    read_s: float = 0.0  # of each event with a miss, before the first byte
    miss_bytes_per_s: float = math.inf  # from the tier that misses come from
    far_bytes_per_s: float = math.inf  # from disk, for what RAM behind a GPU does not hold
    kept: float = 0.0  # share of the compute speed that is left while experts arrive
    busy: float = 1.0  # share of the transfer speed that is left while experts are computed
    prompt_layer_s: float = 0.0  # of each layer of a prompt, where it takes another path
    prompt_miss_bytes_per_s: float | None = None  # of what a prompt misses, where that is brought in another way
    flops_per_s: float = math.inf  # of products with many tokens
    experts: Sequence[ExpertPoint] = ()
    efficiency: Mapping[str, float] = field(default_factory=dict)  # of the memory's speed, where nothing is measured
    spread: float = 0.1  # how far all this may be off, as a share of a token's time
    source: str = "given"

    def expert_s(self, precision: str, matrices: Matrices, expert_bytes: int) -> float:
        """One expert with one token."""
        point = self.nearest(precision, matrices)
        if point is None:
            return expert_bytes / (self.memory_bytes_per_s * self._efficiency(precision))
        return point.one_s if point.matrices == matrices else expert_bytes / point.bytes_per_s

    def _efficiency(self, precision: str) -> float:
        return self.efficiency.get(precision) or min(self.efficiency.values(), default=1.0)

    def nearest(self, precision: str, matrices: Matrices) -> ExpertPoint | None:
        """The measured expert whose matrices are most like these."""
        own = [point for point in self.experts if point.precision == precision and len(point.matrices) == len(matrices)]
        return min(own, key=lambda point: _distance(point.matrices, matrices), default=None)


def weights_of(matrices: Matrices) -> int:
    """The numbers of an expert."""
    return sum(outputs * inputs for outputs, inputs in matrices)


def _distance(one: Matrices, other: Matrices) -> float:
    pairs = [(a, b) for first, second in zip(one, other, strict=True) for a, b in zip(first, second, strict=True)]
    return sum(abs(math.log(a / b)) for a, b in pairs)


GPU_LINK_SHARE = 0.91
"""What kernels of a GPU that drives itself read of host memory, as a share of what the copy engine does."""
_GPU_EFFICIENCY = {"bfloat16": 0.53, "float16": 0.53, "fp8": 0.55, "int8": 0.55, "int4": 0.40, "mxfp4": 0.40}
_GPU_REST_EFFICIENCY = 0.31
_GPU_LAYER_S, _HOST_LAYER_S = 60e-6, 2.2e-3
_GPU_FLOPS_PER_BYTE = 15.0  # of prompts, per byte that the memory reads


def gpu_rates(
    memory_bytes_per_s: float,
    link_bytes_per_s: float,
    disk_bytes_per_s: float,
    *,
    host: bool,
    layer_s: float | None = None,
    host_layer_s: float | None = None,
    expert_bytes_per_s: float | None = None,
    spread: float = 0.15,
    source: str = "given",
) -> Rates:
    """A GPU by its memory and its link; what is not given is as measured on one H200 (docs/results/gpu.md).

    The share of the memory's speed by format is of its kernels alone, that of other weights and the time of a layer of
    Qwen3-30B-A3B's shape with all experts resident. Where torch's products of plain experts read a larger share of the
    memory's speed than hotset's kernels did there, all formats do so much better; where they read a smaller one, what
    was seen is how long launches take.
    """
    seen = (expert_bytes_per_s or 0.0) / memory_bytes_per_s
    better = max(seen / _GPU_EFFICIENCY["bfloat16"], 1.0)
    by_host = host_layer_s or _HOST_LAYER_S
    return Rates(
        engine=Engine.HOST if host else Engine.DEVICE,
        memory_bytes_per_s=memory_bytes_per_s,
        rest_bytes_per_s=memory_bytes_per_s * _GPU_REST_EFFICIENCY,
        layer_s=by_host if host else layer_s or _GPU_LAYER_S,
        miss_bytes_per_s=link_bytes_per_s * (1.0 if host else GPU_LINK_SHARE),
        far_bytes_per_s=disk_bytes_per_s,
        prompt_layer_s=by_host,
        prompt_miss_bytes_per_s=link_bytes_per_s,
        flops_per_s=memory_bytes_per_s * _GPU_FLOPS_PER_BYTE,
        efficiency={name: min(share * better, 1.0) for name, share in _GPU_EFFICIENCY.items()},
        spread=2 * spread if host else spread,
        source=source,
    )


_CPU_EFFICIENCY = {
    "bfloat16": 0.5, "float16": 0.5, "float32": 0.5, "int8": 0.63, "int4": 0.8, "mxfp4": 0.77, "fp8": 0.4,
}  # fmt: skip
_CPU_FLOPS_PER_BYTE = 3.0


def cpu_rates(memory_bytes_per_s: float, disk_bytes_per_s: float, *, spread: float = 0.25) -> Rates:
    """A CPU that is not there, by its memory and its disk; all else is as two cores of an AMD EPYC were measured."""
    return Rates(
        engine=Engine.CPU,
        memory_bytes_per_s=memory_bytes_per_s,
        rest_bytes_per_s=memory_bytes_per_s * _CPU_EFFICIENCY["bfloat16"],
        layer_s=0.84e-3,
        event_s=0.23e-3,
        partial_s=0.4e-3,
        miss_s=0.08e-3,
        read_s=0.54e-3,
        miss_bytes_per_s=disk_bytes_per_s,
        kept=0.87,
        busy=0.81,
        flops_per_s=memory_bytes_per_s * _CPU_FLOPS_PER_BYTE,
        efficiency=_CPU_EFFICIENCY,
        spread=spread,
    )
