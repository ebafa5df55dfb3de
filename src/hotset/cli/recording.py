"""Records prompts batch by batch; padding and what follows an answer's end are no tokens and leave no rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.cli.generate import Sampling, end_ids, generating, pad_id, settings
from hotset.cli.interrupts import Interrupt, Stopped
from hotset.cli.loading import Loaded
from hotset.cli.prompt_files import LabelledPrompt
from hotset.cli.prompts import check_ids, encode_prompt, room_for
from hotset.errors import HotsetError
from hotset.trace import Trace
from hotset.trace.recorder import Recorder

Mask = npt.NDArray[np.bool_]
Queue = list[tuple[list[int], dict[str, str]]]
"""The tokens and the labels of prompts."""


class Recording:
    """What was routed for the prompts that are complete."""

    def __init__(self, loaded: Loaded, sampling: Sampling, guesses: int = 0) -> None:
        self.loaded, self.sampling, self.guesses = loaded, sampling, guesses
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

    def run(self, queue: Queue, batch: int, advance: Callable[[], None]) -> None:
        """Answer the prompts in their order, so many at a time; Ctrl-C ends it after the last complete batch."""
        import torch

        torch.manual_seed(self.sampling.seed or 0)
        with self.loaded.trace(self.guesses) as self._recorder, Interrupt(self.loaded.model) as interrupt:
            for first in range(0, len(queue), batch):
                some = queue[first : first + batch]
                if interrupt.asked or not self._answer([ids for ids, _ in some], interrupt):
                    self.interrupted = True
                    return
                self.labels += [labels for _, labels in some]
                for _ in some:
                    advance()

    def trace(self) -> Trace:
        """All complete prompts as a trace."""
        if self._recorder is None:
            raise HotsetError("nothing was recorded")
        labels = tuple(self.labels) if any(self.labels) else ()
        return self._recorder.finish(labels).take(np.concatenate(self._kept))

    def _answer(self, prompts: list[list[int]], interrupt: Interrupt) -> bool:
        """Answer one batch; false, and no trace of it, if the person stopped it."""
        from transformers import StoppingCriteriaList

        recorder = self._recorder
        if recorder is None:
            return False
        begin = len(recorder.blocks)
        ids, mask = self._padded(prompts)
        room = room_for(self.loaded, ids.shape[1], self.sampling.max_new_tokens)
        with suppress(Stopped), generating(self.loaded):
            out = self.loaded.model.generate(
                ids,
                attention_mask=mask,
                **settings(self.loaded, self.sampling, room),
                stopping_criteria=StoppingCriteriaList([interrupt.criterion]),
            )
        if interrupt.asked:
            del recorder.blocks[begin:]
            return False
        rows = [len(block.experts) for block in recorder.blocks[begin:]]
        self._kept.append(_real_rows(rows, mask.cpu().numpy(), out.cpu().numpy(), end_ids(self.loaded)))
        return True

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
