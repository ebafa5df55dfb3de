"""A limit for the whole process: what is left of it for experts once all else has its share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hotset.errors import BudgetError, HotsetError
from hotset.options import RunOptions
from hotset.options.run import AUTO
from hotset.shape import format_size, parse_size

_ROUNDING_BYTES = 32 << 20
"""What a process holds differs a little from one start to the next."""


def within_process_memory(options: RunOptions, place: str) -> tuple[RunOptions, list[str]]:
    """The same options with the memory for experts that a limit for the whole process leaves, and a line that says so.

    It is the account that `--memory auto` draws up, with the limit in the place of what is free. Without a limit
    nothing changes.
    """
    if options.process_memory is None:
        return options, []
    if options.memory != AUTO:
        raise HotsetError("--process-memory and --memory exclude each other: the one follows from the other")
    needs = _needs(options, place)
    room = int((parse_size(options.process_memory) - needs.beside_bytes) * (1 - needs.safety))
    if room < needs.least_bytes:
        least_mib = int(needs.beside_bytes + needs.least_bytes / (1 - needs.safety) + _ROUNDING_BYTES) >> 20
        raise BudgetError(
            f"--process-memory {options.process_memory} leaves {format_size(max(room, 0))} for experts, and "
            f"{format_size(needs.least_bytes)} are the least: pass --process-memory {least_mib}MiB, or a smaller "
            "--context"
        )
    # transformers holds pieces of experts twice while it loads them all: only where there is room for that.
    whole = room >= 2 * needs.all_bytes
    given = needs.all_bytes if whole else min(room, needs.all_bytes - needs.expert_bytes)
    everything = format_size(needs.all_bytes)
    left = f"room for all {everything} of them" if whole else f"{format_size(given)} for them, of {everything} in all"
    taken = format_size(needs.beside_bytes)
    line = (
        f"--process-memory {options.process_memory}: the process takes {taken} beside the experts, which leaves {left}"
    )
    return replace(options, process_memory=None, memory="100%" if whole else f"{given}B"), [line]


class _Needs(NamedTuple):
    """What a model takes."""

    beside_bytes: int  # the process as it is, and all that comes beside the experts
    least_bytes: int  # experts that one event needs
    all_bytes: int  # all experts
    expert_bytes: int
    safety: float  # the share of what is left for experts that no account covers


def _needs(options: RunOptions, place: str) -> _Needs:
    from hotset.cache.plan import Scope
    from hotset.models.account import compile_ahead, decoding_bytes, reading_bytes, take_account
    from hotset.models.budget import SAFETY, least_slots, shape_of
    from hotset.models.device import torch_device
    from hotset.models.pretrained import inspect_checkpoint

    device = torch_device(options.device)
    if device.type != "cpu":
        raise HotsetError("--process-memory is for models on a CPU: use --memory and --host-memory here")
    compile_ahead(options.policy_on(device.type))  # what that takes is part of what is held
    found = inspect_checkpoint(place, {"trust_remote_code": options.trust_remote_code})
    shape = shape_of(found.moe_layers, found.catalog)
    work = decoding_bytes(found.catalog, device) + reading_bytes(found.catalog, options.threads)
    account = take_account(found.model, device, shape.top_k, context=options.context, expert_work_bytes=work)
    beside = account.dense_bytes + account.context_bytes + account.work_bytes
    size = shape.expert_bytes or 0
    least = max(least_slots(shape, Scope(options.scope)), shape.top_k) + 1
    return _Needs(resident_bytes() + beside, least * size, shape.total_experts * size, size, SAFETY)


def resident_bytes() -> int:
    """What this process holds now."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        raise HotsetError("this system does not say how much memory a process holds: use --memory") from None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["VmRSS"].split()[0]) * 1024
