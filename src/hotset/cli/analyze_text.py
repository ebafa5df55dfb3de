"""The text of a trace's tokens: by a tokenizer that was named, or that of the trace's model where it is here."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hotset.cli.output import note
from hotset.errors import HotsetError
from hotset.generation.prompt_files import SHIPPED

if TYPE_CHECKING:
    from hotset.analysis.token_text import Decode
    from hotset.trace import Trace

SHIPPED_TRACES = "hotset reference model"
"""What the traces that ship with hotset call the model."""
_MAX_CONFIG_BYTES = 1 << 20


def text_of_traces(targets: list[str], trace: Trace, tokenizer: Path | None) -> Decode | None:
    """The text of tokens by their ids, if anything is known of it."""
    from hotset.analysis.token_text import from_file, has_tokenizers
    from hotset.reference import path as reference_path

    if tokenizer is not None:
        return from_file(tokenizer)
    if trace.token_ids is None or not has_tokenizers():
        return None
    shipped = all(target.startswith(SHIPPED) for target in targets) or trace.meta.get("model") == SHIPPED_TRACES
    folder = reference_path() if shipped else _folder_of(trace)
    if folder is None:
        return None
    try:
        found = from_file(folder)
    except HotsetError as error:  # the trace itself is sound
        note(f"tokens have no text: {error}; --tokenizer FOLDER gives it")
        return None
    if folder != reference_path():
        note(f"the text of tokens is by the tokenizer in {folder}; --tokenizer FOLDER names another")
    return found


def _folder_of(trace: Trace) -> Path | None:
    """The folder of the model that a trace names, if there is one with a tokenizer that can be its own."""
    from hotset.analysis.token_text import NAME
    from hotset.generation.known_models import all_models

    name = trace.meta.get("model", "")
    if not name or Path(name).name != name:
        return None
    known = [Path(model.place) for model in all_models() if model.name.rpartition("/")[2] == name]
    places = (folder for folder in (*known, Path(name)) if (folder / NAME).is_file())
    return next((folder for folder in places if _fits(folder, trace)), None)


def _fits(folder: Path, trace: Trace) -> bool:
    """Whether the model of a folder is of the trace's architecture, and has all its tokens."""
    from hotset.reading import read_bounded

    with suppress(OSError, ValueError, TypeError, LookupError, RecursionError, HotsetError):
        config = json.loads(read_bounded(folder / "config.json", _MAX_CONFIG_BYTES))
        words = config.get("vocab_size") or config["text_config"]["vocab_size"]
        assert trace.token_ids is not None  # noqa: S101 - asked for only with them
        own = trace.meta.get("architecture")
        return own in config["architectures"] and int(trace.token_ids.max(initial=0)) < words
    return False
