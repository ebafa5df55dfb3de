"""How far one model is from another that speaks the same tokens: both teacher-forced over the same text.

They run one after the other; the logits of the first wait on the disk, so that only one model is in memory.
"""

from __future__ import annotations

import gc
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hotset.analysis.prune_source import RECORD_FILE
from hotset.errors import HotsetError
from hotset.generation.errors import LOADING, translate_errors
from hotset.generation.text_model import load_tokenizer
from hotset.generation.texts import text_of_file
from hotset.models.load import load_model
from hotset.models.quality import Distances, WaitingLogits
from hotset.models.windows import LOGIT_BYTES, PASS_TOKENS, TokenText, Window, logits_of
from hotset.options import RunOptions
from hotset.reading import parse_bounded
from hotset.shape import format_size

COMPARED_TOKENS = 1 << 13
"""What is taken of each text, spread evenly over it."""
Progress = Callable[[int, int], None]


def compare(
    model: str,
    other: str,
    text_files: Sequence[Path],
    options: RunOptions | None = None,
    *,
    most_tokens: int = COMPARED_TOKENS,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The perplexity of both models, and how far the other is from the first: KL divergence and agreement."""
    options = options or RunOptions()
    files = list(dict.fromkeys(text_files))
    texts = _told_apart(files, [_same_tokens(file, model, other, options, most_tokens) for file in files])
    windows = tuple(window for text in texts for window in text.windows)
    joined = TokenText(", ".join(text.name for text in texts), "", windows)
    parts = _distances(model, other, joined, options, progress)
    labels = [text.name for text in texts]
    by_text = {name: _figures(Distances.joined([d for label, d in parts if label == name])) for name in labels}
    return {
        "model": model,
        "other": other,
        "texts": [{"name": text.name, "sha256": text.sha256, "tokens": text.tokens} for text in texts],
        **_figures(Distances.joined([distances for _, distances in parts])),
        **({"parts": by_text} if len(by_text) > 1 else {}),
        "notes": _notes(other, texts),
    }


def _same_tokens(file: Path, model: str, other: str, options: RunOptions, most_tokens: int) -> TokenText:
    """A text as the tokens of the first model, which must be those of the other, too."""
    first, second = (
        text_of_file(file, load_tokenizer(place, options.trust_remote_code), most_tokens) for place in (model, other)
    )
    if first.windows != second.windows:
        raise HotsetError(f"{model} and {other} do not have the same tokenizer: only such models are compared")
    return first


def _told_apart(files: Sequence[Path], texts: Sequence[TokenText]) -> list[TokenText]:
    """Texts under the names of their files; files that have one name in common under their paths."""
    many = Counter(text.name for text in texts)
    names = [text.name if many[text.name] == 1 else str(file) for file, text in zip(files, texts, strict=True)]
    return [
        TokenText(name, text.sha256, tuple(replace(window, label=name) for window in text.windows))
        for name, text in zip(names, texts, strict=True)
    ]


def _distances(
    model: str, other: str, text: TokenText, options: RunOptions, progress: Progress | None
) -> list[tuple[str, Distances]]:
    """Of each window: its text, and how far both models are from each other on it."""
    tell, found = progress or (lambda *_: None), []
    options = replace(options, context=max(options.context, PASS_TOKENS))
    vocabulary = _vocabulary(model, options)
    if vocabulary != _vocabulary(other, options):
        raise HotsetError(f"{model} and {other} do not have the same number of tokens: only such models are compared")
    passes = text.passes(vocabulary)
    with TemporaryDirectory(prefix="hotset-compare-") as folder:
        waiting = WaitingLogits(Path(folder) / "logits", "")
        _check_room(Path(folder), text.tokens * vocabulary * LOGIT_BYTES)
        with _loaded(model, options) as loaded:
            for number, windows in enumerate(passes):
                waiting.keep(number, logits_of(loaded, windows))
                tell(number + 1, 2 * len(passes))
        with _loaded(other, options) as loaded:
            for number, windows in enumerate(passes):
                found += list(_compared(windows, waiting.logits(number), logits_of(loaded, windows)))
                tell(len(passes) + number + 1, 2 * len(passes))
    return found


def _compared(windows: Sequence[Window], first: torch.Tensor, second: torch.Tensor) -> Iterator[tuple[str, Distances]]:
    for window, one, two in zip(windows, first, second, strict=True):
        size = len(window.ids)
        if size > 1:
            yield window.label, Distances.between(one[:size], two[:size].cpu(), torch.tensor(window.ids))


def _figures(distances: Distances) -> dict[str, float]:
    try:
        found = distances.summary()
    except HotsetError as error:  # which names a flag of another command
        raise HotsetError("a model's probabilities are not finite: it cannot be compared") from error
    return {("other_perplexity" if name == "packed_perplexity" else name): value for name, value in found.items()}


def _notes(other: str, texts: Sequence[TokenText]) -> list[str]:
    """Whether experts were chosen by the very text that their loss is measured on."""
    try:
        record = parse_bounded((Path(other) / RECORD_FILE).read_bytes(), values=1 << 22, containers=1 << 18)
        chosen_by = str(record["text"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [
        f"{text.name} is the text that the experts were chosen by: measure on another"
        for text in texts
        if text.sha256 in chosen_by
    ]


def _vocabulary(model: str, options: RunOptions) -> int:
    from transformers import AutoConfig

    with translate_errors(model, "load the config", "check config.json, or download it again"):
        config = AutoConfig.from_pretrained(model, trust_remote_code=options.trust_remote_code)
    return int(config.get_text_config().vocab_size)


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise HotsetError(
            f"the logits of the first model need up to {format_size(needed)} in {folder.parent} and "
            f"{format_size(free)} are free: free some space, or set TMPDIR to another disk"
        )


@contextmanager
def _loaded(model: str, options: RunOptions) -> Iterator[Any]:
    """A model for the length of a block; its memory is free afterwards."""
    with translate_errors(model, "load the model", LOADING):
        loaded = load_model(model, options, None)
    loaded.eval()
    try:
        yield loaded
    finally:
        loaded.hotset.close()
        del loaded
        gc.collect()
