"""A recording of steps that are under way side by side: whole ones only, in the order of their numbers."""

from __future__ import annotations

import numpy as np
import pytest

from hotset import ModelShape, Phase
from hotset.errors import TraceError
from hotset.trace.recorder import Recorder

LAYERS = 3


def note(recorder: Recorder, number: int, layer: int, tokens: int = 1) -> None:
    """The experts that a layer is said to have chosen tell the step."""
    weights, request = np.ones((tokens, 1), np.float16), np.full(tokens, number, np.int32)
    recorder.note(number, layer, np.full((tokens, 1), number), weights, request, Phase.DECODE)


def test_steps_that_take_turns_are_whole_and_in_order() -> None:
    recorder = Recorder(ModelShape(LAYERS, 8, 1))
    for layer in range(LAYERS):
        for number in (2, 1, 3):
            note(recorder, number, layer, tokens=number)
    for number in (3, 1, 2):
        recorder.end(number)
    trace = recorder.finish()
    assert trace.experts[:, :, 0].tolist() == [[1] * 3, [2] * 3, [2] * 3, [3] * 3, [3] * 3, [3] * 3]
    assert trace.step.tolist() == [0, 1, 1, 2, 2, 2]
    assert trace.request.tolist() == [0, 1, 1, 2, 2, 2]


def test_a_step_that_calls_some_layers_is_kept_once_it_is_over() -> None:
    """An encoder has layers of its own, and comes before the decoder of the same step."""
    recorder = Recorder(ModelShape(LAYERS, 8, 1))
    note(recorder, 1, 0, tokens=4)
    note(recorder, 1, 1)
    note(recorder, 1, 2)
    assert recorder.blocks == []
    recorder.end(1)
    trace = recorder.finish()
    assert trace.experts[:, :, 0].tolist() == [[1, -1, -1]] * 4 + [[-1, 1, 1]]


@pytest.mark.parametrize("way", ["abandon", "drop_incomplete", "neither"])
def test_what_was_broken_off_leaves_no_rows(way: str) -> None:
    recorder = Recorder(ModelShape(LAYERS, 8, 1))
    note(recorder, 1, 0)
    note(recorder, 1, 1)
    for layer in range(LAYERS):
        note(recorder, 2, layer)
    if way == "abandon":
        recorder.abandon(1)
    elif way == "drop_incomplete":
        recorder.drop_incomplete()
        note(recorder, 1, 2)  # a thread that goes on
        recorder.end(1)
    recorder.end(2)
    assert recorder.finish().experts[:, :, 0].tolist() == [[2] * 3]


def test_a_recording_of_nothing_whole_is_refused() -> None:
    recorder = Recorder(ModelShape(LAYERS, 8, 1))
    note(recorder, 1, 0)
    with pytest.raises(TraceError, match="nothing was recorded"):
        recorder.finish()


def test_recordings_have_numbers_of_their_own() -> None:
    first, second = (Recorder(ModelShape(LAYERS, 8, 1)) for _ in range(2))
    assert 0 < first.number < second.number
