"""`hotset pack`: rewrite a checkpoint so that one read fetches one expert, and check what was written."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from hotset.cli import run_options as opt
from hotset.cli.budgets import settled
from hotset.cli.live import with_messages
from hotset.cli.output import JsonFlag, bars, emit, note
from hotset.cli.quality_view import quality_line
from hotset.errors import HotsetError
from hotset.options import RunOptions
from hotset.options.run import DTYPES

EXPERTS = ("auto", "dense", "int8", "int4", "mxfp4")
NO_MIXED = (
    "experts are not packed as mixed: bits by use need formats of 3 bits and slots of several sizes, which hotset has "
    "not (docs/results/lowbit.md, Bits by use); use int8, int4 or mxfp4"
)
"""What --experts mixed is answered, with or without the --profile and --target that it would have."""


@with_messages
def pack(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A folder with a model, a hub id or a GGUF file.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="The folder to write.", show_default=False)
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Type of the packed experts: auto (the model's own), bfloat16, float16 or float32.")
    ] = "auto",
    experts: Annotated[
        str,
        typer.Option(
            help="Experts as auto (in the checkpoint's own format), dense (plain numbers), or, of plain numbers, made "
            "small: int8, int4 or mxfp4, in groups of 32."
        ),
    ] = "auto",
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Choose scales by what this text brings to each expert.", show_default=False),
    ] = None,
    quality: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measure what small experts cost on this text; none: on a small one that ships with hotset.",
            show_default=False,
        ),
    ] = None,
    no_quality: Annotated[bool, typer.Option("--no-quality", help="Do not measure it.")] = False,
    memory: opt.Memory = "auto",
    verify: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Read a pack again and check every digest, instead.", show_default=False),
    ] = None,
    profile: Annotated[str | None, typer.Option(hidden=True)] = None,
    target: Annotated[str | None, typer.Option(hidden=True)] = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Rewrite a model so that one direct read fetches one expert.

    The folder loads like the model it came from. Given again, an interrupted
    command goes on where it stopped.

    Quantised experts keep their format. With --experts int4 those of an
    unquantised model take a little more than a quarter of their bytes. What
    that costs is measured, kept in the pack, and shown by hotset doctor.

    Example: hotset pack Qwen/Qwen3-30B-A3B -o qwen3-packed --experts int4
    """
    _refuse(experts == "mixed" or profile is not None or target is not None, NO_MIXED)
    if verify is not None:
        return _verify(verify, as_json, alone=model is None and out is None)
    if model is None or out is None:
        raise HotsetError(
            "give a model and the folder to write: hotset pack MODEL -o DIR (or: hotset pack --verify DIR)"
        )
    asked = _request(dtype, experts, calibrate, quality, measured=not no_quality)
    return _pack(model, out, RunOptions(memory=settled(memory), trust_remote_code=trust_remote_code), asked, as_json)


def _request(
    dtype: str, experts: str, calibrate: Path | None, quality: Path | None, *, measured: bool
) -> dict[str, Any]:
    """What the pack is to be; refused before the work where a word is unknown."""
    _refuse(dtype not in DTYPES, f"no type is called {dtype}: use {', '.join(DTYPES)}")
    _refuse(experts not in EXPERTS, f"experts are packed as {', '.join(EXPERTS)}, not {experts:.60}")
    return {"dtype": dtype, "experts": experts, "calibrate": calibrate, "quality": quality, "measured": measured}


def _pack(model: str, out: Path, options: RunOptions, asked: dict[str, Any], as_json: bool) -> None:
    from hotset.cli.loading import quiet_libraries
    from hotset.generation.errors import LOADING, translate_errors
    from hotset.generation.known_models import is_temporary, remember
    from hotset.generation.text_model import locate
    from hotset.shape import format_size

    place = locate(model)
    with ExitStack() as stack:
        try:
            from hotset.generation.packs import PackMaker

            stack.enter_context(quiet_libraries())
        except ModuleNotFoundError as error:
            raise HotsetError(f"packing needs {error.name}: pip install 'hotset[models]'") from error
        bar = stack.enter_context(bars())
        stack.enter_context(translate_errors(place, "pack the model", LOADING))
        report, quality, warning = PackMaker(place, out, options, **asked).make(bar)
    remember(str(report.folder))
    document = dataclasses.asdict(report) | {
        "folder": str(report.folder), "bytes": report.size_bytes, "quality": quality,
    }  # fmt: skip
    del document["size_bytes"]
    told = "is a complete pack of this model already" if report.complete_already else "written and read back"
    kept = f", {report.resumed:,} of them from an earlier run" if report.resumed else ""
    size = format_size(report.size_bytes)
    if warning is not None:
        note(warning)
    if is_temporary(str(report.folder)):
        note(f"{out} is in a folder for temporary files: hotset models does not list it, name it by its path")
    lines = [f"{out}: {told}, {report.experts:,} experts{kept}, {size} in {report.seconds:.1f} s"]
    emit(document, as_json, *lines, *(() if quality is None else (f"quality: {quality_line(quality)}",)))


def _verify(folder: Path, as_json: bool, *, alone: bool) -> None:
    from hotset.shape import format_size
    from hotset.store.packed import is_packed
    from hotset.store.verify import verify_packed

    _refuse(not alone, "--verify takes the folder of a pack and nothing else")
    _refuse(not is_packed(folder), f"{folder} is no packed model: make one with hotset pack MODEL -o DIR")
    with bars() as bar, bar("reading") as progress:
        report = verify_packed(folder, progress)
    document = {"folder": str(folder), "experts": report.experts, "files": report.files, "bytes": report.size_bytes}
    size = format_size(report.size_bytes)
    if not report.small:
        note("an earlier hotset made this pack: it has no digests for config.json and the other small files")
    told = f"{report.experts:,} experts and {report.files:,} files, {size}, all digests right"
    emit(document | {"damaged": 0}, as_json, f"{folder}: {told}")


def _refuse(wrong: bool, why: str) -> None:
    if wrong:
        raise HotsetError(why)
