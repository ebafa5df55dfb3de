"""Records prompts batch by batch; padding and what follows an answer's end are no tokens and leave no rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.errors import HotsetError
from hotset.generation.answer import arguments, end_ids, generating, pad_id
from hotset.generation.checkpoints import Checkpoints
from hotset.generation.prompt_files import LabelledPrompt
from hotset.generation.prompts import check_ids, encode_prompt
from hotset.generation.sampling import Sampling
from hotset.generation.stopping import Stop, Stopped, StopWatch, watching
from hotset.generation.text_model import TextModel
from hotset.trace import Trace
from hotset.trace.recorder import Recorder

Labels = dict[str, str]
Mask = npt.NDArray[np.bool_]
Queue = list[tuple[list[int], Labels]]
"""The tokens and the labels of prompts."""


def record_prompts(
    text_model: TextModel,
    prompts: Sequence[LabelledPrompt],
    sampling: Sampling | None = None,
    *,
    batch: int = 1,
    lookahead: int = 0,
    use_template: bool | None = None,
    stop: Stop | None = None,
    checkpoints: Checkpoints | None = None,
    on_prompt: Callable[[], object] = lambda: None,
) -> Trace | None:
    """Let a model answer prompts, so many at a time, and return what it routed; None if it was stopped before a token.

    All prompts are encoded first: one that is too long is refused before the work begins. `lookahead` records also what
    the routers of so many layers ahead predict. What there is goes to `checkpoints` from time to time, and `on_prompt`
    is called after every prompt. `stop` ends it with what there is; the last answer may be cut short.
    """
    sampling, stop = sampling or Sampling(max_new_tokens=64, seed=0), stop or Stop()
    queue = _encoded(text_model, prompts, use_template, sampling.system)
    return _Recording(text_model, sampling, stop, checkpoints).run(queue, batch, lookahead, on_prompt)


def _encoded(
    text_model: TextModel, prompts: Sequence[LabelledPrompt], use_template: bool | None, system: str | None
) -> Queue:
    queue: Queue = []
    for number, prompt in enumerate(prompts, 1):
        ids = encode_prompt(text_model, prompt.text, use_template, system)[0].tolist()
        try:
            text_model.max_new_tokens_for(len(ids), 1)
        except HotsetError as error:
            raise HotsetError(f"prompt {number}: {error}") from None
        queue.append((ids, prompt.labels))
    return queue


class _Recording:
    """What was routed for prompts, and for answers as far as they came."""

    def __init__(
        self, text_model: TextModel, sampling: Sampling, stop: Stop, checkpoints: Checkpoints | None = None
    ) -> None:
        self.text_model, self.sampling, self.stop, self.checkpoints = text_model, sampling, stop, checkpoints
        self.labels: list[Labels] = []
        self._kept: list[Mask] = []

    def run(self, queue: Queue, batch: int, lookahead: int, on_prompt: Callable[[], object]) -> Trace | None:
        """Answer the prompts in their order; if that is stopped, answers end where they are."""
        import torch

        torch.manual_seed(self.sampling.seed or 0)
        with self.text_model.trace(lookahead) as recorder, watching(self.text_model.model, self.stop) as watch:
            for first in range(0, len(queue), batch):
                some = queue[first : first + batch]
                if not self.stop.asked and self._answer(some, recorder, watch):
                    self.labels += [labels for _, labels in some]
                    self._offer(lambda: self._trace(recorder))
                if self.stop.asked:
                    break
                for _ in some:
                    on_prompt()
        return self._trace(recorder) if self.labels else None

    def _trace(self, recorder: Recorder, more: Sequence[Mask] = (), more_labels: Sequence[Labels] = ()) -> Trace:
        """All that was answered as a trace, and the rows so far of a batch that is under way."""
        labels = (*self.labels, *more_labels)
        return recorder.finish(labels if any(labels) else ()).take(np.concatenate([*self._kept, *more]))

    def _offer(self, make: Callable[[], Trace]) -> None:
        if self.checkpoints is not None:
            self.checkpoints.offer(make)

    def _answer(self, some: Queue, recorder: Recorder, watch: StopWatch) -> bool:
        """Answer one batch; false, and no trace of it, if it was stopped before the first token."""
        begin, out = recorder.mark(), None
        ids, mask = self._padded([prompt for prompt, _ in some])
        labels = [labels for _, labels in some]

        def look(so_far: Any, scores: Any) -> Any:
            """Keep what there is of an answer that takes long; a criterion of transformers that stops nothing more."""
            watch.begun = True
            self._offer(lambda: self._trace(recorder, [self._real(recorder, begin, mask, so_far)], labels))
            return watch.criterion(so_far, scores)

        room = self.text_model.max_new_tokens_for(ids.shape[1], self.sampling.max_new_tokens)
        watch.begun = False
        with suppress(Stopped), generating(self.text_model):
            out = self.text_model.model.generate(
                ids, attention_mask=mask, **arguments(self.text_model, self.sampling, room, look)
            )
        if out is None:
            recorder.forget_since(begin)
            return False
        self._kept.append(self._real(recorder, begin, mask, out))
        return True

    def _real(self, recorder: Recorder, begin: int, mask: Any, out: Any) -> Mask:
        """Which rows of a batch are tokens."""
        return _real_rows(recorder.rows_since(begin), mask.cpu().numpy(), out.cpu().numpy(), end_ids(self.text_model))

    def _padded(self, prompts: list[list[int]]) -> tuple[Any, Any]:
        """Prompts of different length as one batch, padded on the left, and which of its places are real."""
        import torch

        width, fill = max(map(len, prompts)), pad_id(self.text_model)
        check_ids(self.text_model, fill, fill)
        ids = torch.tensor([[fill] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        device = self.text_model.model.device
        return ids.to(device), mask.to(device)


def _real_rows(rows: list[int], mask: npt.NDArray[Any], out: npt.NDArray[Any], ends: set[int]) -> Mask:
    """Which recorded rows are tokens of the prompts or of answers that were still going on."""
    if len(mask) == 1:
        return np.ones(sum(rows), bool)
    new = out[:, mask.shape[1] :]
    going_on = np.cumsum(np.isin(new, list(ends)), axis=1) == 0
    # The last token of an answer is never put in, so it is not routed.
    places = np.concatenate([mask.astype(bool), going_on[:, :-1]], axis=1)
    steps = np.cumsum([size // len(mask) for size in rows])[:-1]  # a long prompt takes several
    real = np.concatenate([some.reshape(-1) for some in np.split(places, steps, axis=1)])
    if len(real) != sum(rows):
        raise HotsetError(f"the model computed {sum(rows)} rows for {len(real)} tokens of a batch: use --batch 1")
    return real
