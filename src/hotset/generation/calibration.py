"""A model run over text for the sake of what goes into its experts: by that the scales of a pack are chosen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from hotset.models.load import load_model
from hotset.models.moments import Moments
from hotset.models.windows import PASS_TOKENS, TokenText, run_over
from hotset.options import RunOptions

MAX_TOKENS = 1 << 16
"""More text changes moments little, and costs time: all experts are read once for every 4,096 tokens."""


@dataclass(frozen=True)
class TextCalibration:
    """A model, how it is run, and the text it is run over."""

    model: str
    options: RunOptions
    text: TokenText
    bar: Callable[[], AbstractContextManager[Callable[[int, int], None] | None]] = nullcontext

    @property
    def meta(self) -> dict[str, str]:
        """What was run, for the pack to say."""
        text = self.text
        return {"calibration": f"{text.name}, {text.tokens:,} tokens, SHA-256 {text.sha256}"}

    def collect(self, moments: Moments, state: Path) -> None:
        """Fill the moments, a pass at a time, each kept in a file until all are there."""
        passes = self.text.passes()
        done = moments.load(state, self.meta)
        if done >= len(passes):
            return
        moments.observe()
        # A pass needs nearly all experts of every layer in turn: to predict them would save nothing.
        options = replace(self.options, context=max(self.options.context, PASS_TOKENS), engine="host", prefetch="off")
        model = load_model(self.model, options, None, kernels=moments.kernels)
        model.eval()
        try:
            with self.bar() as progress:
                for number in range(done, len(passes)):
                    run_over(model, passes[number])
                    moments.save(state, self.meta, number + 1)
                    if progress is not None:
                        progress(number + 1, len(passes))
        finally:
            model.hotset.close()
