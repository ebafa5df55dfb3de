"""`hotset doctor`: what this machine offers, what a model needs, and what hotset will choose."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.cli import run_options as opt
from hotset.cli.live import with_messages
from hotset.cli.output import JsonFlag, emit
from hotset.errors import HotsetError
from hotset.shape import format_size

if TYPE_CHECKING:
    from hotset.models.pretrained import Inspected
    from hotset.store import Catalog

Choice = tuple[str, str, str]
"""A decision: what is decided, what for, and why."""


@with_messages
def doctor(
    model: opt.Model = None,
    path: Annotated[
        Path | None, typer.Option(help="Measure the disk under this folder.", show_default="the model's, or this one")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure what plans need, and keep it; best on a quiet machine.")
    ] = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Look at this machine: versions, memory, GPUs, the speed of the disk, and what hotset will use and why.

    Example: hotset doctor ./Qwen3-30B-A3B
    """
    from hotset.cli.doctor_view import report_views

    if path is not None and not path.is_dir():
        raise HotsetError(f"there is no folder {path}: give one on the disk to measure")
    report = examine(model, path, trust_remote_code)
    if measure:
        from hotset.cli.doctor_measure import calibrate

        report["calibration"] = calibrate(model, path, trust_remote_code)
    if model is not None and not report["gpus"] and "auto_bytes" in report["model"]:
        report["model"]["tokens_per_s"] = _speed(model, report["model"]["auto_bytes"], trust_remote_code)
    emit(report, as_json, *(() if as_json else report_views(report)))


def _speed(model: str, experts_bytes: int, trust_remote_code: bool) -> dict[str, float] | None:
    """What to expect of the model with `--memory auto`, by what was measured here."""
    from hotset.analysis.planner.expecting import expected_speed
    from hotset.cli.plan_sources import plan_model
    from hotset.options.run import CONTEXT_TOKENS

    try:
        return expected_speed(plan_model(model, None, CONTEXT_TOKENS, trust_remote_code), experts_bytes)
    except HotsetError:  # sizes that plans do not know keep nothing else from being told
        return None


def examine(model: str | None, path: Path | None, trust_remote_code: bool = False) -> dict[str, Any]:
    """All findings; what cannot be found out says why and keeps nothing else from being told."""
    from hotset.cli import doctor_machine as machine

    files, about = _model(model, trust_remote_code)
    # The largest file of a model tells most about the disk.
    checkpoint = max(files, key=lambda file: file.stat().st_size) if files and path is None else None
    here = Path.cwd() if os.access(Path.cwd(), os.W_OK) else Path(tempfile.gettempdir())
    report: dict[str, Any] = {
        "software": _probe(machine.software),
        "processor": _probe(machine.processor),
        "memory": _probe(machine.memory),
        "gpus": _probe(machine.gpus),
        "limits": _probe(machine.pinnable_bytes),
        "disk": _probe(lambda: machine.disk(checkpoint.parent if checkpoint else path or here, checkpoint)),
        "model": about,
    }
    return report | {"choices": choices(report)}


def _probe(ask: Callable[[], Any]) -> Any:
    """The answer, or why there is none."""
    try:
        return ask()
    except Exception as error:
        return {"unknown": str(error) or type(error).__name__}


def _model(model: str | None, trust_remote_code: bool) -> tuple[Sequence[Path], dict[str, Any] | None]:
    """The files of a model and what it needs; one that does not exist is an error, one that cannot be run a finding."""
    if model is None:
        return (), None
    from hotset.cli.loading import quiet_libraries
    from hotset.generation.errors import LOADING, translate_errors
    from hotset.generation.text_model import locate

    place = locate(model)
    files: list[Path] = []

    def look() -> dict[str, Any]:
        with quiet_libraries(), translate_errors(place, "load the model", LOADING):
            from hotset.models.pretrained import inspect_checkpoint

            found = inspect_checkpoint(place, {"trust_remote_code": trust_remote_code})
            files.extend(found.catalog.files)
            return _needs(found)

    return files, {"model": model} | _probe(look)


def _needs(found: Inspected) -> dict[str, Any]:
    """The sizes that a person decides by, from a model's config and the headers of its files."""
    from hotset.cache.plan import Scope
    from hotset.models.account import take_account
    from hotset.models.budget import SAFETY, least_slots, shape_of
    from hotset.models.device import torch_device
    from hotset.options.run import AUTO, CONTEXT_TOKENS

    shape = shape_of(found.moe_layers, found.catalog)
    account = take_account(found.model, torch_device(AUTO), shape.top_k, context=CONTEXT_TOKENS)
    least, size = max(least_slots(shape, Scope.LAYER), shape.top_k), shape.expert_bytes or 0
    total, auto = shape.total_experts * size, int(account.expert_bytes * (1 - SAFETY))
    return {
        "family": found.model.config.model_type,
        "layers": shape.layers,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "expert_bytes": size,
        "all_experts_bytes": total,
        "dense_bytes": account.dense_bytes,
        "quarter_bytes": shape.total_experts // 4 * size,
        "cycle_bytes": shape.token_cycle * size,
        "least_slots": least,
        "least_bytes": (least + 1) * size,  # one slot at least is for staging
        "auto_bytes": min(auto, total),
        "fits": total <= auto,
        "host_only": _host_only(found),
        "experts_format": _format(found.catalog),
        "pack": _pack(found.catalog.files[0].parent),
    }


def _format(catalog: Catalog) -> dict[str, Any]:
    """How a checkpoint has its experts, how they lie in memory, and what becomes plain numbers on arrival."""
    from hotset.models.catalog import EXPANDED, STORED_AS

    layouts = [layer.layout for layer in catalog.layers]
    own = {matrix.format for layout in layouts for matrix in layout.matrices}
    packed = {name for layout in layouts for matrix in layout.matrices for name in matrix.parts}
    plain = {part.dtype for layout in layouts for part in layout.parts if part.name not in packed}
    expanded = catalog.meta.get(EXPANDED) or None
    return {
        "stored": catalog.meta.get(STORED_AS) or " and ".join(sorted({s.partition(":")[0] for s in own} or plain)),
        "in_memory": sorted(own | plain if expanded else own or plain),  # without biases beside matrices in a format
        "expanded": expanded,
    }


def _pack(folder: Path) -> dict[str, Any] | None:
    """What a packed model says of itself: its experts' formats, what they were calibrated on, and their quality."""
    from hotset.store.packed import is_packed, open_index

    if not is_packed(folder):
        return None
    index = open_index(folder)
    formats = {matrix.format for layer in index.plan.layers for matrix in layer.layout.matrices}
    return {
        "formats": sorted(formats) or [index.plan.meta.get("dtype", "")],
        "calibration": index.plan.meta.get("calibration"),
        "quality": index.quality,
    }


def _host_only(found: Inspected) -> str | None:
    """What keeps a device from driving these experts by the default policy; nothing where there is none to ask."""
    import torch

    from hotset.cache.plan import Scope
    from hotset.engine.support import DeviceSupport
    from hotset.options import RunOptions
    from hotset.policies import parse

    if not torch.cuda.is_available():
        return None
    specs, layouts = (each.spec for each in found.moe_layers), (each.layout for each in found.catalog.layers)
    encoder_decoder, usual = bool(getattr(found.model.config, "is_encoder_decoder", False)), RunOptions()
    layers = zip(specs, layouts, strict=True)
    reasons = DeviceSupport.check(parse(usual.policy), Scope(usual.scope), layers, encoder_decoder=encoder_decoder)
    return reasons[0] if reasons else None


def choices(report: dict[str, Any]) -> list[dict[str, str]]:
    """One row per decision: what, which, and the reason."""
    from hotset.transfer.readers import default_threads

    memory, model, gpus = report["memory"], report["model"], report["gpus"]
    why = "enough to keep a disk busy; more compete with compute for cores"
    rows = [_engine(gpus), ("reader threads", str(default_threads()), why), _direct(report["disk"])]
    rows.append(("memory auto", *_memory(memory, model)))
    if gpus and isinstance(gpus, list):
        rows.append(("driven by", *_driver(memory, model)))
    return [dict(zip(("what", "value", "why"), row, strict=True)) for row in rows]


def _engine(gpus: Any) -> Choice:
    if not isinstance(gpus, list):
        return "engine", "cpu", f"GPUs are unknown ({gpus['unknown']})"
    if not gpus:
        return "engine", "cpu", "torch sees no CUDA device"
    return "engine", "cuda", f"torch sees {gpus[0]['name']}"


def _direct(disk: dict[str, Any]) -> Choice:
    if "direct" not in disk:
        return "direct I/O", "if the disk has it", f"unknown here: {disk.get('unknown', 'not measured')}"
    if disk["direct"]:
        return "direct I/O", "yes", "the file system reads past the page cache, which no budget counts"
    return "direct I/O", "no", "the file system has no direct reads: pages are dropped after each read instead"


def _memory(memory: dict[str, Any], model: dict[str, Any] | None) -> tuple[str, str]:
    why = "90 % of what is available, less a context of 4,096 tokens and the rest of the model"
    if model and "auto_bytes" in model:
        return format_size(model["auto_bytes"]), "all experts fit" if model["fits"] else why
    if "unknown" in memory:
        return "unknown", memory["unknown"]
    return f"up to {format_size(0.9 * memory['available_bytes'])}", f"{why} (name it, and this is exact)"


def _driver(memory: dict[str, Any], model: dict[str, Any] | None) -> tuple[str, str]:
    """What drives the GPU, with all options at their defaults."""
    if find_spec("triton") is None:
        return "the host", "Triton is missing: pip install triton"
    if not model or "host_only" not in model:
        return "the device if it can", "Triton is there (name a model, and this is exact)"
    if model["fits"]:
        return "neither host nor device", "all experts fit: the model runs as transformers made it"
    if model["host_only"]:
        return "the host", model["host_only"]
    if "unknown" in memory:
        return "unknown", memory["unknown"]
    from hotset.models.memory_plan import HOST_SHARE, HOST_STAGING

    needed, expert = model["all_experts_bytes"], model["expert_bytes"]
    tier = int(memory["available_bytes"] * HOST_SHARE) // expert - HOST_STAGING
    if tier * expert < needed:  # the device fetches from host memory alone
        found = f"{format_size(max(tier, 0) * expert)} of {format_size(needed)}"
        return "the host", f"host memory holds {found} of experts, and the device needs them all there"
    return "the device", "Triton is there, and host memory holds all experts"
