"""`hotset doctor --measure`: what plans need to know of this machine, measured once and kept."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from hotset.cli.output import note
from hotset.options.run import CONTEXT_TOKENS

BUSY_CORES = 0.3
"""Other programs that take more than this make a calibration worth little."""


def calibrate(model: str | None, path: Path | None, trust_remote_code: bool) -> dict[str, Any]:
    """Measure, keep, and return what was found; of a model also the time of its experts, and its generic hits."""
    from hotset.analysis.planner.calibration import save
    from hotset.analysis.planner.hits import POLICIES
    from hotset.analysis.planner.measuring import THOROUGH
    from hotset.analysis.planner.workload import generic
    from hotset.cli.plan_sources import measured_here, plan_model, replayed

    planned = None if model is None else plan_model(model, None, CONTEXT_TOKENS, trust_remote_code)
    began, before_s = time.perf_counter(), _others_s()
    found = measured_here(planned, THOROUGH, path)
    others = 0.0 if before_s is None else ((_others_s() or 0.0) - before_s) / (time.perf_counter() - began)
    if others > BUSY_CORES:
        note(f"other programs took {others:.1f} cores meanwhile: measure again when they are done")
    if planned is not None:
        found = found.with_curve(replayed(generic(planned.shape)).curves[POLICIES[0]])
    file = save(found)
    return found.as_dict() | {"file": str(file), "others_cores": round(max(others, 0.0), 2)}


def _others_s() -> float | None:
    """The processor time that all programs but this one have taken so far; None where the system does not tell."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        user, nice, system, _, _, irq, soft = map(int, words[:7])
    except (OSError, ValueError):
        return None
    own = os.times()
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK") - sum(own[:4])
