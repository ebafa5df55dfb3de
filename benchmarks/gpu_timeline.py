"""Where the time of a decode step goes on the GPU: by class of kernel, with bytes moved and the share of bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CLASSES = {
    "experts": ("up_kernel", "down_kernel", "up_units_kernel", "down_units_kernel", "order_kernel"),
    "plan": ("plan_event", "follow_event"),
    "demand copies": ("gather",),
    "guesses: copies": ("send",),
    "guesses: choice": ("claim", "pick"),
    "attention": ("_attend", "_combine", "fmha", "flash"),
    "projections and lm_head": ("nvjet", "gemm", "gemv", "splitKreduce", "cutlass"),
    "router's top-k": ("topk", "TopK", "bitonic", "softmax"),
    "norms, rotations and the rest": ("",),
}
HBM_GB_PER_S = {"NVIDIA H200": 4800}
STEPS = 8


def timeline(step: Callable[[int], Any], expert_bytes_read: int, other_bytes_read: int) -> dict[str, Any]:
    """The classes of a few profiled steps; classes overlap, so their sum may be more than the step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step(STEPS)
        torch.cuda.synchronize()
    ms: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
    launches = 0
    for event in found.key_averages():
        kind = next(name for name, parts in CLASSES.items() if any(part in event.key for part in parts))
        ms[kind] += event.device_time_total / 1e3 / STEPS
        launches += event.count
    peak = next((speed for name, speed in HBM_GB_PER_S.items() if torch.cuda.get_device_name().startswith(name)), None)
    read = {"experts": expert_bytes_read, "projections and lm_head": other_bytes_read}
    speed = {kind: size / max(ms[kind], 1e-9) / 1e6 for kind, size in read.items()}
    return {
        "kernels": launches // STEPS,
        "ms_by_class": ms,
        "bytes_read": read,
        "gb_per_s": speed,
        "share_of_hbm": None if peak is None else {kind: value / peak for kind, value in speed.items()},
    }
