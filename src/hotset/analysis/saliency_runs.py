"""A model run over text or prompts for its saliency, from where an interrupted run has stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from hotset.analysis.saliency import Saliency
from hotset.analysis.saliency_kernels import SaliencyRecorder
from hotset.errors import HotsetError
from hotset.generation.answer import generate
from hotset.generation.prompt_files import LabelledPrompt, read_text
from hotset.generation.prompts import encode_prompt
from hotset.generation.sampling import Sampling
from hotset.generation.text_model import TextModel, load_tokenizer
from hotset.generation.texts import BUILT_IN, built_in_text, text_of_file
from hotset.models.load import load_model
from hotset.models.windows import PASS_TOKENS, WINDOW_TOKENS, Window, run_over
from hotset.options import RunOptions

TEXT_TOKENS = 1 << 16
"""What is taken of texts, spread evenly over them."""
Progress = Callable[[int, int], None]


class Workload(Protocol):
    """What a model is run on, pass by pass."""

    @property
    def name(self) -> str:
        """What it is, for files to say."""

    @property
    def context(self) -> int:
        """The tokens that one pass needs room for."""

    def passes(self, tokenizer: Any) -> Sequence[Any]:
        """What to run, in its order."""

    def run(self, text_model: TextModel, one: Any) -> None:
        """Run one of them."""


@dataclass(frozen=True)
class TextFiles:
    """Texts, teacher-forced in windows; all tokens are prefill."""

    files: tuple[Path, ...]
    most_tokens: int = TEXT_TOKENS
    context = PASS_TOKENS

    @property
    def name(self) -> str:
        """The names of the files, what is taken of them, and a digest of what each holds."""
        digests = ", ".join(hashlib.sha256(read_text(file).encode()).hexdigest() for file in self.files)
        names = ", ".join(file.name for file in self.files)
        return f"{names}, at most {self.most_tokens:,} tokens, SHA-256 {digests}"

    def passes(self, tokenizer: Any) -> Sequence[Sequence[Window]]:
        """Windows of one length each: what fills a shorter one up would count as tokens."""
        share, least = self.most_tokens // len(self.files), 2 * len(self.files)
        if share < 2:
            raise HotsetError(f"{self.most_tokens} tokens are too few to judge by: pass --tokens {least} or more")
        texts = [text_of_file(file, tokenizer, share) for file in self.files]
        return _alike([window for text in texts for window in text.windows])

    def run(self, text_model: TextModel, one: Sequence[Window]) -> None:
        """Run the model over some windows."""
        run_over(text_model.model, one)


@dataclass(frozen=True)
class BuiltInText:
    """The text in 14 languages and notations that ships with hotset, teacher-forced: it takes next to no time."""

    name = BUILT_IN
    context = PASS_TOKENS

    def passes(self, tokenizer: Any) -> Sequence[Sequence[Window]]:
        """Windows of one length each."""
        return _alike(built_in_text(tokenizer).windows)

    def run(self, text_model: TextModel, one: Sequence[Window]) -> None:
        """Run the model over some windows."""
        run_over(text_model.model, one)


@dataclass(frozen=True)
class Prompts:
    """Prompts that the model answers, greedily, one at a time: prompts are prefill, answers are decode."""

    file: str
    prompts: tuple[LabelledPrompt, ...]
    max_new_tokens: int = 64

    @property
    def name(self) -> str:
        """The name of the file, the length of answers, and a digest of all prompts."""
        digest = hashlib.sha256("\0".join(prompt.text for prompt in self.prompts).encode("utf-8", "replace"))
        return (
            f"{Path(self.file).name}, {len(self.prompts):,} prompts, {self.max_new_tokens} new tokens, "
            f"SHA-256 {digest.hexdigest()}"
        )

    @property
    def context(self) -> int:
        """Room for one answer; a longer prompt takes its own."""
        return self.max_new_tokens

    def passes(self, _: Any) -> Sequence[LabelledPrompt]:
        """Each prompt by itself."""
        return self.prompts

    def run(self, text_model: TextModel, one: LabelledPrompt) -> None:
        """Answer one prompt."""
        sampling = Sampling(max_new_tokens=self.max_new_tokens, temperature=0.0)
        generate(text_model, encode_prompt(text_model, one.text), sampling)


def record_saliency(
    model: str,
    workload: Workload,
    options: RunOptions,
    *,
    state: Path | None = None,
    progress: Progress | None = None,
) -> Saliency:
    """Run a model over a workload and return what its experts did; `state` keeps what an interrupt would lose."""
    tokenizer = load_tokenizer(model, options.trust_remote_code)
    passes, name = workload.passes(tokenizer), workload.name
    done, earlier = _kept(state, name)
    if earlier is not None and done >= len(passes):
        return _whole(earlier, name)
    # A pass needs nearly all experts of every layer in turn: to predict them would save nothing.
    context = max(options.context, workload.context)
    options = replace(
        options, model=model, context=context, engine="host", prefetch="off", device=cpu_only(options.device)
    )
    recorder = SaliencyRecorder()
    loaded = load_model(model, options, None, kernels=recorder.kernels)
    loaded.eval()
    text_model = TextModel(loaded, tokenizer, options, model)
    try:
        saliency = recorder.begin(loaded, {}, earlier)
        for number in range(done, len(passes)):
            workload.run(text_model, passes[number])
            if state is not None:
                replace(saliency, meta={"text": name, "passes": str(number + 1)}).save(state)
            if progress is not None:
                progress(number + 1, len(passes))
    finally:
        text_model.close()
    return _whole(saliency, name)


def _alike(windows: Sequence[Window]) -> list[list[Window]]:
    """Windows of one length, as many as one pass takes, the longest first."""
    many, longest = PASS_TOKENS // WINDOW_TOKENS, sorted(windows, key=lambda one: -len(one.ids))
    alike = [list(group) for _, group in groupby(longest, key=lambda one: len(one.ids))]
    return [group[first : first + many] for group in alike for first in range(0, len(group), many)]


def cpu_only(device: str) -> str:
    """The device to record on: a CPU, whatever else is there."""
    if device not in ("auto", "cpu"):
        raise HotsetError("saliency is recorded on a CPU: pass --device cpu")
    return "cpu"


def _whole(saliency: Saliency, name: str) -> Saliency:
    """The same without the marks of an unfinished run; checked once more, for numbers that are none."""
    return replace(saliency, meta={"text": name})


def _kept(state: Path | None, name: str) -> tuple[int, Saliency | None]:
    """What an interrupted run over the same workload has kept; what is damaged is recorded again."""
    if state is not None and state.exists():
        with suppress(HotsetError, KeyError, ValueError):
            found = Saliency.load(state)
            if found.meta["text"] == name:
                return int(found.meta["passes"]), found
    return 0, None
