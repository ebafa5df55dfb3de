"""The rates of a GPU: copies over its link and within its memory, and the products of experts by torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hotset.analysis.planner.calibration import GpuFigures
from hotset.analysis.planner.measure_experts import usual_s
from hotset.analysis.planner.rates import Matrices, weights_of
from hotset.errors import HotsetError

COPIED_BYTES = 256 << 20
"""Several times what caches hold; half as much again is what a GPU must have free."""
MATRICES: Matrices = ((5760, 2880), (2880, 2880))
"""Of an expert that is large enough for launches to be short beside it: gpt-oss's."""


def measure_gpu(device: torch.device, seconds: float) -> GpuFigures:
    """Measure a device; a CPU stands in for one in tests, with the same calls."""
    try:
        memory, link = _copies(device, seconds)
        experts = _experts(device, seconds)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        raise HotsetError(f"the GPU cannot be measured ({error}): close other programs that use it") from error
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return GpuFigures(
        name=name, memory_bytes_per_s=memory, link_bytes_per_s=link, layer_s=None, host_layer_s=None,
        expert_bytes_per_s=experts,
    )  # fmt: skip


def _copies(device: torch.device, seconds: float) -> tuple[float, float]:
    """Bytes per second of the memory, of which a copy reads and writes each, and from page-locked memory to it."""
    host = torch.ones(COPIED_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    one, other = (torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    within_s = usual_s(_waited(lambda: other.copy_(one), device), seconds)
    over_s = usual_s(_waited(lambda: one.copy_(host, non_blocking=True), device), seconds)
    return 2 * COPIED_BYTES / within_s, COPIED_BYTES / over_s


@torch.inference_mode()
def _experts(device: torch.device, seconds: float) -> float:
    """Bytes per second that products of one token with one expert after another read."""
    count = max(2 * COPIED_BYTES // (2 * weights_of(MATRICES)), 1)
    ups, downs = (torch.ones((count, *sides), dtype=torch.bfloat16, device=device) for sides in MATRICES)
    token = torch.ones((1, MATRICES[0][1]), dtype=torch.bfloat16, device=device)

    def all_of_them() -> None:
        for up, down in zip(ups, downs, strict=True):
            gate, inner = (token @ up.T).chunk(2, dim=-1)
            (torch.nn.functional.silu(gate) * inner) @ down.T

    return 2 * count * weights_of(MATRICES) / usual_s(_waited(all_of_them, device), seconds)


def _waited(call: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """A call that ends when the device has done what was asked of it."""

    def whole() -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return whole
