"""Replays captured steps."""

from __future__ import annotations

from typing import Any

import torch

from hotset.engine.device.capture import CapturedStep
from hotset.engine.device.follow import Follower, PendingStep
from hotset.engine.host.streams import Streams
from hotset.engine.step import Step
from hotset.trace.recorder import Recorder

Tensor = torch.Tensor


class Replay:
    """Has the device serve a step by running its graph; meanwhile the host follows the step before it."""

    def __init__(self, follower: Follower, streams: Streams) -> None:
        self._follower, self._streams = follower, streams

    def run(self, step: Step, captured: CapturedStep, inputs: dict[str, Tensor], recorder: Recorder | None) -> Any:
        """Launch a step; returns its outputs, which the next replay overwrites.

        What is recorded is followed at once: a recording is read between steps.
        """
        timed, captured.is_fresh = not captured.is_fresh, False
        began = self._streams.moment()
        try:
            for name, tensor in inputs.items():
                captured.inputs[name].copy_(tensor)
            if captured.kernels.plan.follows_requests:
                captured.kernels.plan.tell(step.requests(captured.kernels.tokens))
            captured.graph.replay()
            self._note_launch(step, captured, began, recorder, timed=timed)
        except BaseException:
            self._follower.drain()
            if captured.kernels.log.has_unread():  # an interrupt came after the launch
                self._note_launch(step, captured, began, recorder, timed=False)
            raise
        self._follower.drain(keep=1 if recorder is None else 0)
        return captured.outputs

    def _note_launch(
        self, step: Step, captured: CapturedStep, began: Any, recorder: Recorder | None, *, timed: bool
    ) -> None:
        over, log = self._streams.moment(), captured.kernels.log
        self._follower.add(PendingStep(log, log.note_launch(), step, captured.variant, began, over, timed, recorder))
