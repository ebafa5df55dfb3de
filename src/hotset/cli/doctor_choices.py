"""What hotset will choose on this machine, and why."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from hotset.shape import format_size


def choices(report: dict[str, Any]) -> list[dict[str, str]]:
    """One row per decision: what, which, and the reason."""
    memory, model = report["memory"], report["model"]
    rows = [_engine(report["gpus"]), _threads(), _direct(report["disk"]), _memory(memory, model)]
    return rows + ([_driver(memory, model)] if rows[0]["value"] == "cuda" else [])


def _row(what: str, value: str, why: str) -> dict[str, str]:
    return {"what": what, "value": value, "why": why}


def _engine(gpus: Any) -> dict[str, str]:
    if not isinstance(gpus, list):
        return _row("engine", "cpu", f"GPUs are unknown ({gpus['unknown']})")
    if not gpus:
        return _row("engine", "cpu", "torch sees no CUDA device")
    return _row("engine", "cuda", f"torch sees {gpus[0]['name']}")


def _driver(memory: dict[str, Any], model: dict[str, Any] | None) -> dict[str, str]:
    """What drives the GPU, with all options at their defaults."""
    if find_spec("triton") is None:
        return _row("driven by", "the host", "Triton is missing: pip install triton")
    if not model or "host_only" not in model:
        return _row("driven by", "the device if it can", "Triton is there (name a model, and this is exact)")
    if model["fits"]:
        return _row("driven by", "neither host nor device", "all experts fit: the model runs as transformers made it")
    if model["host_only"]:
        return _row("driven by", "the host", model["host_only"])
    if "unknown" in memory:
        return _row("driven by", "unknown", memory["unknown"])
    return _driver_by_memory(memory["available_bytes"], model["all_experts_bytes"], model["expert_bytes"])


def _driver_by_memory(available: int, needed: int, expert: int) -> dict[str, str]:
    """The device fetches from host memory alone, so all experts must be there."""
    from hotset.models.memory_plan import HOST_SHARE, HOST_STAGING

    tier = int(available * HOST_SHARE) // expert - HOST_STAGING
    if tier * expert < needed:
        found = f"{format_size(max(tier, 0) * expert)} of {format_size(needed)}"
        return _row(
            "driven by", "the host", f"host memory holds {found} of experts, and the device needs them all there"
        )
    return _row("driven by", "the device", "Triton is there, and host memory holds all experts")


def _threads() -> dict[str, str]:
    from hotset.transfer.readers import default_threads

    return _row(
        "reader threads", str(default_threads()), "enough to keep a disk busy; more compete with compute for cores"
    )


def _direct(disk: dict[str, Any]) -> dict[str, str]:
    if "direct" not in disk:
        return _row("direct I/O", "if the disk has it", f"unknown here: {disk.get('unknown', 'not measured')}")
    if disk["direct"]:
        return _row("direct I/O", "yes", "the file system reads past the page cache, which no budget counts")
    return _row("direct I/O", "no", "the file system has no direct reads: pages are dropped after each read instead")


def _memory(memory: dict[str, Any], model: dict[str, Any] | None) -> dict[str, str]:
    if model and "auto_bytes" in model:
        value = format_size(model["auto_bytes"])
        return _row("memory auto", value, "all experts fit" if model["fits"] else _reason("the rest of the model"))
    if "unknown" in memory:
        return _row("memory auto", "unknown", memory["unknown"])
    value = format_size(0.9 * memory["available_bytes"])
    return _row("memory auto", f"up to {value}", _reason("the rest of the model (name it, and this is exact)"))


def _reason(rest: str) -> str:
    return f"90 % of what is available, less a context of 4,096 tokens and {rest}"
