"""Records prompts batch by batch; padding and what follows an answer's end are no tokens and leave no rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.cli.checkpoints import Checkpoints
from hotset.cli.generate import end_ids, generating, pad_id, settings
from hotset.cli.interrupts import Interrupt, Stopped
from hotset.cli.loading import Loaded
from hotset.cli.prompt_files import LabelledPrompt
from hotset.cli.prompts import check_ids, encode_prompt, room_for
from hotset.errors import HotsetError
from hotset.generation.sampling import Sampling
from hotset.trace import Trace
from hotset.trace.recorder import Recorder

Mask = npt.NDArray[np.bool_]
Queue = list[tuple[list[int], dict[str, str]]]
"""The tokens and the labels of prompts."""


class Recording:
    """What was routed for prompts, and for answers as far as they came."""

    def __init__(
        self, loaded: Loaded, sampling: Sampling, guesses: int = 0, checkpoints: Checkpoints | None = None
    ) -> None:
        self.loaded, self.sampling, self.guesses, self.checkpoints = loaded, sampling, guesses, checkpoints
        self.labels: list[dict[str, str]] = []
        self.interrupted = False
        self._kept: list[Mask] = []
        self._recorder: Recorder | None = None

    def encode(self, prompts: Sequence[LabelledPrompt], use_template: bool | None) -> Queue:
        """The tokens of all prompts; one that is too long is refused before the work begins."""
        queue: Queue = []
        for number, prompt in enumerate(prompts, 1):
            ids = encode_prompt(self.loaded, prompt.text, use_template)[0].tolist()
            try:
                room_for(self.loaded, len(ids), 1)
            except HotsetError as error:
                raise HotsetError(f"prompt {number}: {error}") from None
            queue.append((ids, prompt.labels))
        return queue

    def run(self, queue: Queue, batch: int, interrupt: Interrupt, advance: Callable[[], None]) -> None:
        """Answer the prompts in their order, so many at a time; if that is stopped, answers end where they are."""
        import torch

        torch.manual_seed(self.sampling.seed or 0)
        with self.loaded.trace(self.guesses) as self._recorder:
            for first in range(0, len(queue), batch):
                some = queue[first : first + batch]
                if not interrupt.asked and self._answer(some, interrupt):
                    self.labels += [labels for _, labels in some]
                    self._offer(self.trace)
                if interrupt.asked:
                    self.interrupted = True
                    return
                for _ in some:
                    advance()

    def trace(self, more: Sequence[Mask] = (), more_labels: Sequence[dict[str, str]] = ()) -> Trace:
        """All that was answered as a trace, and the rows so far of a batch that is under way."""
        if self._recorder is None:
            raise HotsetError("nothing was recorded")
        labels = (*self.labels, *more_labels)
        return self._recorder.finish(labels if any(labels) else ()).take(np.concatenate([*self._kept, *more]))

    def _offer(self, make: Callable[[], Trace]) -> None:
        if self.checkpoints is not None:
            self.checkpoints.offer(make)

    def _answer(self, some: Queue, interrupt: Interrupt) -> bool:
        """Answer one batch; false, and no trace of it, if it was stopped before the first token."""
        from transformers import StoppingCriteriaList

        recorder = self._recorder
        if recorder is None:
            return False
        begin, out = len(recorder.blocks), None
        ids, mask = self._padded([prompt for prompt, _ in some])

        def look(so_far: Any, scores: Any) -> Any:
            """Keep what there is of an answer that takes long; a criterion of transformers that stops nothing more."""
            interrupt.begun = True
            self._offer(lambda: self.trace([self._real(begin, mask, so_far)], [labels for _, labels in some]))
            return interrupt.criterion(so_far, scores)

        room = room_for(self.loaded, ids.shape[1], self.sampling.max_new_tokens)
        interrupt.begun = False
        with suppress(Stopped), generating(self.loaded):
            out = self.loaded.model.generate(
                ids,
                attention_mask=mask,
                **settings(self.loaded, self.sampling, room),
                stopping_criteria=StoppingCriteriaList([look]),
            )
        if out is None:
            del recorder.blocks[begin:]
            return False
        self._kept.append(self._real(begin, mask, out))
        return True

    def _real(self, begin: int, mask: Any, out: Any) -> Mask:
        """Which rows of a batch are tokens; its blocks are those from a number on."""
        blocks = [] if self._recorder is None else self._recorder.blocks[begin:]
        rows = [len(block.experts) for block in blocks]
        return _real_rows(rows, mask.cpu().numpy(), out.cpu().numpy(), end_ids(self.loaded))

    def _padded(self, prompts: list[list[int]]) -> tuple[Any, Any]:
        """Prompts of different length as one batch, padded on the left, and which of its places are real."""
        import torch

        width, fill = max(map(len, prompts)), pad_id(self.loaded)
        check_ids(self.loaded, fill, fill)
        ids = torch.tensor([[fill] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        device = self.loaded.model.device
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
