"""`hotset doctor`: what this machine offers, and what hotset will choose on it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hotset.cli import run_options as opt
from hotset.cli.output import JsonFlag, emit
from hotset.errors import HotsetError


def doctor(
    model: opt.Model = None,
    path: Annotated[
        Path | None, typer.Option(help="Measure the disk under this folder.", show_default="the model's, or this one")
    ] = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Look at this machine: versions, memory, GPUs, the speed of the disk, and what hotset will use and why.

    Example: hotset doctor ./Qwen3-30B-A3B
    """
    if path is not None and not path.is_dir():
        raise HotsetError(f"there is no folder {path}: give one on the disk to measure")
    report = examine(model, path, trust_remote_code)
    if as_json:
        emit(report, True)
        return
    from hotset.cli.doctor_view import report_views

    emit({}, False, *report_views(report))


def examine(model: str | None, path: Path | None, trust_remote_code: bool = False) -> dict[str, Any]:
    """All findings; what cannot be found out says why and keeps nothing else from being told."""
    from hotset.cli import doctor_machine as machine
    from hotset.cli.doctor_choices import choices

    files, about = _model(model, trust_remote_code)
    report: dict[str, Any] = {
        "software": _probe(machine.software),
        "processor": _probe(machine.processor),
        "memory": _probe(machine.memory),
        "gpus": _probe(machine.gpus),
        "limits": _probe(machine.pinnable_bytes),
        "disk": _disk(path, files),
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
    from hotset.cli.doctor_model import needs
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
            return needs(model, found)

    return files, {"model": model} | _probe(look)


def _disk(path: Path | None, files: Sequence[Path]) -> dict[str, Any]:
    from hotset.cli.doctor_disk import disk

    # The largest file tells most about the disk.
    checkpoint = max(files, key=lambda file: file.stat().st_size) if files and path is None else None
    here = Path.cwd() if os.access(Path.cwd(), os.W_OK) else Path(tempfile.gettempdir())
    answer: dict[str, Any] = _probe(lambda: disk(checkpoint.parent if checkpoint else path or here, checkpoint))
    return answer
