"""The commands that a plan comes to."""

from __future__ import annotations

import math
import shlex

from hotset.analysis.planner.model import PlannedModel, Precision
from hotset.analysis.planner.rates import Engine
from hotset.analysis.planner.tiers import HOST_STAGING, Split
from hotset.options.run import DEFAULT_POLICY

PROMPT = "..."
_MIB = 1 << 20


def commands_for(
    model: PlannedModel, precision: Precision, found: Split, policy: str, context: int | None
) -> list[str]:
    """What to type: a pack first, where the precision is made by one."""
    name, lines = model.name, []
    if not model.there and "/" not in name:
        name = f"./{name}"  # a folder to be made
    if precision.pack is not None:
        packed = f"{name.rstrip('/')}-{precision.name}"
        lines.append(shlex.join(["hotset", "pack", name, "-o", packed, "--experts", precision.pack]))
        name = packed
    words = ["hotset", "run", *([] if name == "reference" else [name]), "--memory", _memory(found)]
    words += ["--device", "cpu" if found.engine is Engine.CPU else "cuda"]
    if found.ram_slots:
        ram = found.ram_bytes + (0 if found.ram_slots >= found.total else HOST_STAGING * found.expert_bytes)
        words += ["--host-memory", "100%" if found.ram_slots >= found.total else f"{math.ceil(ram / _MIB)}MiB"]
    if precision.expand:
        words += ["--experts", "dense"]
    if policy != DEFAULT_POLICY:
        words += ["--policy", policy]
    if context is not None:
        words += ["--context", str(context)]
    return [*lines, shlex.join([*words, "-p", PROMPT])]


def _memory(found: Split) -> str:
    return "100%" if found.slots >= found.total else f"{math.ceil(found.fast_bytes / _MIB)}MiB"
