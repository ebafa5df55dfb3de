"""The text of a trace's tokens: by a tokenizer that was named, or that of the reference model for its traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hotset.generation.prompt_files import SHIPPED

if TYPE_CHECKING:
    from hotset.analysis.token_text import Decode
    from hotset.trace import Trace

REFERENCE = "hotset reference model"
"""What traces of the reference model call it."""


def text_of_traces(targets: list[str], trace: Trace, tokenizer: Path | None) -> Decode | None:
    """The text of tokens by their ids, if anything is known of it."""
    from hotset.analysis.token_text import from_file, has_tokenizers

    if tokenizer is not None:
        return from_file(tokenizer)
    shipped = all(target.startswith(SHIPPED) for target in targets) or trace.meta.get("model") == REFERENCE
    if not shipped or not has_tokenizers():
        return None
    from hotset.reference import path

    return from_file(path())
