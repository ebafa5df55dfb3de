"""`hotset analyze MODEL --prompts FILE`: runs a model to have its routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from hotset.cli.analyze import Workload
from hotset.cli.interrupts import exit_code, stop_on_signals
from hotset.cli.output import note, progress_bar
from hotset.errors import HotsetError, ModelError
from hotset.generation.prompt_files import SHIPPED, LabelledPrompt
from hotset.generation.sampling import Sampling
from hotset.generation.text_model import need_transformers
from hotset.options import RunOptions

if TYPE_CHECKING:
    from hotset.analysis.analyse import SaliencyGrids
    from hotset.analysis.saliency import Saliency
    from hotset.analysis.saliency_kernels import SaliencyRecorder
    from hotset.generation import TextModel
    from hotset.trace import Trace

FILE = "file"
"""The label that tells several files of prompts apart."""
NAMED_FILES = 4
"""A title names so many files, and counts more."""


class Recording(NamedTuple):
    """How prompts are recorded."""

    limit: int | None
    max_new_tokens: int
    batch: int
    lookahead: int
    use_template: bool | None
    keep: Path | None  # where the trace is kept
    saliency: bool = True  # record what each expert contributes, too


def run_model(options: RunOptions, files: Sequence[Path], how: Recording) -> Workload:
    """Let a model answer prompts, and return what it routed."""
    from hotset.analysis.token_text import text_by
    from hotset.cli.loading import loaded_model

    model = str(options.model or "")
    if model.startswith(SHIPPED) or (Path(model).is_file() and ".gguf" not in model):
        raise HotsetError(
            f"{model} is no model, and --prompts needs one: hotset analyze MODEL --prompts {files[0]} {model} if it is "
            "prompts, too; to analyse it as a trace, leave --prompts out"
        )
    prompts = labelled(files, how.limit)
    told = ", ".join(path.name for path in files) if len(files) <= NAMED_FILES else f"{len(files)} files of prompts"
    name = f"{options.name}, {told}"
    if not how.saliency or not _one_by_one(how.batch) or not _on_cpu(options):
        with loaded_model(options) as text_model:
            return Workload(name, _record(text_model, prompts, how), text_by(text_model.tokenizer.decode))
    from hotset.analysis.saliency_kernels import SaliencyRecorder

    recorder = SaliencyRecorder(margins=True)
    with loaded_model(replace(options, engine="host"), recorder.kernels) as text_model:
        saliency = _begin(recorder, text_model)
        trace = _record(text_model, prompts, how)
        margins = None if recorder.margins is None else recorder.margins.margins.quantiles()
        grids = None if saliency is None else replace(_grids(saliency, name), choice_margin=margins)
        return Workload(name, trace, text_by(text_model.tokenizer.decode), grids)


def _one_by_one(batch: int) -> bool:
    """Whether prompts run by themselves: in a batch padding would count as tokens; a line says so."""
    if batch > 1:
        note("the report has no saliency, which is recorded one prompt at a time: leave --batch out for it")
    return batch == 1


def _on_cpu(options: RunOptions) -> bool:
    """Whether the model runs where saliency is recorded; a line says so if not."""
    need_transformers()
    from hotset.models.device import torch_device

    if torch_device(options.device).type == "cpu":
        return True
    note("the report has no saliency, which is recorded with --device cpu")
    return False


def _begin(recorder: SaliencyRecorder, text_model: TextModel) -> Saliency | None:
    """Have what experts contribute added up, where the model lets one see it."""
    try:
        return recorder.begin(text_model.model, {})
    except ModelError as error:
        note(f"the report has no saliency: {error}")
        return None


def _grids(saliency: Saliency, source: str) -> SaliencyGrids:
    """What the report shows of it."""
    import numpy as np

    from hotset.analysis.analyse import SaliencyGrids
    from hotset.shape import ExpertKey

    keys = [ExpertKey(*pair) for pair in np.argwhere(saliency.super_experts()).tolist()]
    return SaliencyGrids(saliency.measures(), keys, source)


def labelled(files: Sequence[Path], limit: int | None) -> list[LabelledPrompt]:
    """The prompts of all files with their labels; those of several also say which file they are from."""
    from hotset.cli.prompt_input import read_labelled

    found = [(file, prompt) for file in files for prompt in read_labelled(file, limit)]
    if len(files) == 1:
        return [prompt for _, prompt in found]
    return [LabelledPrompt(prompt.text, {**prompt.labels, FILE: file.name}) for file, prompt in found]


def _record(text_model: TextModel, prompts: list[LabelledPrompt], how: Recording) -> Trace:
    from hotset.generation import record_prompts

    sampling = Sampling(max_new_tokens=how.max_new_tokens, seed=0)
    with stop_on_signals() as stop:  # until the trace is written
        with progress_bar("recording", len(prompts)) as advance:
            trace = record_prompts(
                text_model,
                prompts,
                sampling,
                batch=how.batch,
                lookahead=how.lookahead,
                use_template=how.use_template,
                stop=stop,
                on_prompt=advance,
            )
        if how.keep is not None and trace is not None:
            trace.save(how.keep)
    if stop.asked:
        kept = "" if how.keep is None or trace is None else f"; {how.keep} has what was recorded"
        note(f"stopped: no report was written{kept}")
        raise typer.Exit(exit_code())
    if trace is None:
        raise HotsetError("the model routed nothing: give it prompts with some words")
    return trace
