"""Where a plan's parts come from: the model, its workload, and the rates of a machine, measured if they must be."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hotset.cli.output import note, progress_bar
from hotset.errors import HotsetError

if TYPE_CHECKING:
    from hotset.analysis.planner.calibration import Calibration
    from hotset.analysis.planner.hits import Hits
    from hotset.analysis.planner.machines import RatesOf, Told
    from hotset.analysis.planner.measuring import Effort, Subject
    from hotset.analysis.planner.model import PlannedModel
    from hotset.analysis.planner.tiers import Memory
    from hotset.analysis.planner.workload import Workload


def plan_model(model: str | None, shape: str | None, context: int, trust_remote_code: bool = False) -> PlannedModel:
    """The sizes of a model, of its files or of its numbers."""
    if shape is not None:
        from hotset.analysis.planner.shapes import parse_shape

        return parse_shape(shape, context)
    from hotset.analysis.planner.inspecting import inspect_model
    from hotset.cli.loading import quiet_libraries

    with quiet_libraries():
        return inspect_model(model, context, trust_remote_code)


def plan_workload(model: PlannedModel, trace: Path | None, profile: str | None, like: str | None) -> Workload:
    """What is replayed: at most one of these, or a generic workload."""
    from hotset.analysis.planner import workload
    from hotset.cli.traces import load_trace
    from hotset.profile.folder import locate

    asked = {"--trace": trace, "--profile": profile, "--like": like}
    given = [flag for flag, value in asked.items() if value is not None]
    if len(given) > 1:
        raise HotsetError(f"{' and '.join(given)} exclude each other: a plan is for one workload")
    if trace is not None:
        return workload.recorded(load_trace(trace), model.shape, str(trace))
    if profile is not None:
        return workload.profiled(locate(profile), model.shape)
    return workload.generic(model.shape) if like is None else workload.like(like, model.shape)


def replayed(workload: Workload, memory: Memory | None = None) -> Hits:
    """The hits of a workload at every size, under the policies that suit a machine with this memory."""
    from hotset.ahead import parts_of_replays
    from hotset.analysis.planner.hits import BOUND, count_replays, policies_for, replay_hits
    from hotset.cli.compiling import compile_missing
    from hotset.sim.sweep import Replays

    on_cpu = memory is not None and memory.gpu_bytes is None
    policies = policies_for(on_cpu=on_cpu, recorded=workload.is_recorded)
    compile_missing(parts_of_replays(Replays((*policies, BOUND))))
    with progress_bar("replaying", count_replays(workload.trace.shape, policies)) as advance:
        return replay_hits(workload.trace, policies, advance=advance)


def ram_here() -> int:
    """The memory that this process can have."""
    from hotset.engine.memory import available_memory_bytes

    return available_memory_bytes()


def gpu_here() -> int | None:
    """The free memory of this machine's GPU, if it has one."""
    try:
        import torch
    except ImportError:
        return None
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else None


def machine_rates(told: Told, model: PlannedModel, memory: Memory) -> tuple[RatesOf, list[str]]:
    """The rates of the machine to plan for, and what is assumed; this one is measured if that was not done yet."""
    from hotset.analysis.planner import calibration
    from hotset.analysis.planner.machines import assumed, rates_elsewhere, rates_here

    found = None if told.is_elsewhere else calibration.load()
    gpu_measured = found is not None and found.gpu is not None
    if told.is_elsewhere or (memory.gpu_bytes is not None and not gpu_measured and gpu_here() is None):
        rates_of = rates_elsewhere(told) if found is None else rates_elsewhere(told, found.cpu.disk_bytes_per_s)
        return rates_of, assumed(told, disk_known=found is not None)
    if found is None or (memory.gpu_bytes is not None and not gpu_measured):
        found = _measured(model)
    on_cpu = memory.gpu_bytes is None
    measured = any(point.matrices == model.matrices for point in found.experts)
    unlike = [
        "experts of this model's size were not measured, so the nearest in size speak for them: hotset doctor "
        f"{model.name} --measure measures them"
    ]
    return rates_here(found, told), unlike if on_cpu and model.there and not measured else []


def _measured(model: PlannedModel) -> Calibration:
    """A quick calibration that is not kept."""
    from hotset.analysis.planner.measuring import QUICK

    note("this machine was not measured yet, so it is now, in short; hotset doctor --measure does it well and keeps it")
    return measured_here(model, QUICK, None)


def measured_here(model: PlannedModel | None, effort: Effort, where: Path | None) -> Calibration:
    """Measure this machine, with a bar on a terminal."""
    import tempfile

    from hotset.analysis.planner.measuring import measure, measurements
    from hotset.cli.loading import quiet_libraries
    from hotset.cli.streams import libraries_silent

    subject = None if model is None else _subject(model)
    with quiet_libraries(), libraries_silent(), progress_bar("measuring", measurements(subject)) as advance:
        return measure(where or Path(tempfile.gettempdir()), subject, effort, advance=advance)


def _subject(model: PlannedModel) -> Subject:
    """What of a model is measured: its experts, and the largest of its files."""
    from hotset.analysis.planner.measuring import Subject

    place = Path(model.name).expanduser()
    files = [file for file in (place, *place.glob("*")) if model.there and file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size, default=None)
    return Subject(model.matrices, model.own_bytes or model.precisions()[0].expert_bytes, largest)
