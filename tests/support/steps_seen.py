"""The steps of a model's answers, as its engine is told of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hotset.engine.step import Step


@contextmanager
def steps_seen(model: Any) -> Iterator[list[Step]]:
    """Collect the steps that end within the block."""
    seen: list[Step] = []
    end = model.hotset.engine.end

    def watched(step: Step, seconds: float) -> None:
        seen.append(step)
        end(step, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.hotset.engine, "end", watched)
        yield seen
