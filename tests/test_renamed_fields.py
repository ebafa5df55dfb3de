"""Names that fields had in earlier versions: taken as arguments and as attributes, with a warning."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

from hotset import ModelShape, Trace
from hotset.cache import SlotPlan
from hotset.sim.sweep import Sweep
from hotset.trace.run import Run

SHAPE = ModelShape(1, 4, 1)
EXPERTS, COLUMN = np.zeros((2, 1, 1), np.int16), np.zeros(2, np.int32)


def trace(**more: object) -> Trace:
    return Trace(SHAPE, EXPERTS, COLUMN, COLUMN, COLUMN.astype(np.uint8), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "old", "new", "value"),
    [
        (trace, "guesses", "predictions", np.zeros((2, 1, 1, 1), np.int16)),
        (lambda **more: SlotPlan(SHAPE, 4, **more), "ahead", "prefetch_rows", 2),
        (lambda **more: Run("lru", "pool", 4, 1, **more), "ahead", "prefetch_rows", 2),
        (Sweep, "ahead", "prefetch_slots", 2),
    ],
)
def test_old_names_work_with_a_warning(make, old, new, value):
    with pytest.warns(DeprecationWarning, match=rf"{old} is deprecated: use {new}") as warned:
        holder = make(**{old: value})
    assert warned[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=new) as warned:
        assert getattr(holder, old) is getattr(holder, new)
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(getattr(replace(holder), new), value)


def test_a_file_keeps_the_name_that_it_always_had(tmp_path):
    from safetensors.numpy import load_file

    saved = trace(predictions=np.array([[[[2, -1]]]] * 2, np.int16))
    saved.save(tmp_path / "a.safetensors")
    assert "guesses" in load_file(tmp_path / "a.safetensors")
    assert np.array_equal(Trace.load(tmp_path / "a.safetensors").predictions, saved.predictions)
    assert Run("lru", "pool", 4, 1, 2).to_meta()["run.ahead"] == "2"
