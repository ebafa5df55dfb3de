"""The engine on a GPU, driven by the device: decode steps are kernels only; prompts go the host's way.

The host reads what the device has served one pass later and serves it again, for its statistics. Whoever wants to
change the cache, the host's own passes included, first takes the device's table back, to the last bit.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from hotset.cache.shadow import log_is_full
from hotset.engine.kernels.triton_experts import TritonExperts
from hotset.errors import HotsetError
from hotset.policies import Policy
from hotset.prefetch.times import MissAdjustedTimes
from hotset.runtime.background import Warmer
from hotset.runtime.caching import Work
from hotset.runtime.device import DeviceEngine
from hotset.runtime.event import LiveEvent
from hotset.runtime.forecasting import ForecastGuesser
from hotset.runtime.graph.ahead_state import AheadState, Tallies
from hotset.runtime.graph.device_table import DeviceTable
from hotset.runtime.graph.plan import Plan
from hotset.runtime.graph.side import DeviceSide, Gate, Shared
from hotset.runtime.step import Step
from hotset.shape import ExpertKey
from hotset.trace import Phase
from hotset.trace.recorder import Recorder

Tensor = torch.Tensor

MAX_TOKENS = 8
"""Tokens of a pass, one of each sequence; more are faster by the host's way of grouping rows by expert."""


class Unread(NamedTuple):
    """A pass that the device serves and the host has not taken in yet: when it began and ended, and what it was."""

    side: DeviceSide
    number: int  # among the passes of that side
    step: Step
    began: Any
    over: Any
    guessing: bool
    timed: bool
    recorder: Recorder | None


class GraphEngine(DeviceEngine):
    """Slots on a GPU; while a decode step runs or is captured, the device decides who sits in them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.next_gate: Gate | None = None  # what the routers of the next layers make of a layer's input
        self.built = 0  # counts what was made for a policy: graphs of an earlier one are of no use
        self._policy: Policy | None = None  # that it was made for
        self._shared: Shared | None = None
        self._sides: dict[int, DeviceSide] = {}
        self.driving = threading.Lock()  # locked while the device serves what comes through `forward`
        self._side: DeviceSide | None = None  # that serves what comes through `forward`, while a step is captured
        self._thread = 0  # whose calls it serves: others go the host's way meanwhile, as soon as they may
        self._rehearsing = False
        self._unread: deque[Unread] = deque()
        self._served: set[int] = set()  # the steps under way that the device was given
        self._driver = "host"
        self._device_is_ahead = False
        self._handed: tuple[Any, ...] | None = None  # the host's changes that the device knows of; None before any
        self._tallied = [0] * len(Tallies._fields)
        self._even_times = MissAdjustedTimes()
        self._filler: Warmer | None = None
        self._full = False
        self.controller.before_change = _taking_back(weakref.ref(self))

    def why_not(self) -> str | None:
        """What keeps this engine from being driven by the device, in words; None if nothing does."""
        plan, guesser = self.controller.plan, self.guesser
        if not self.pinned:
            return "the system refused to lock the RAM tier's memory"
        if self.host.controller.plan.cached < plan.shape.total_experts:
            return "the RAM tier does not hold all experts: give it more by --host-memory"
        if isinstance(guesser, ForecastGuesser) and guesser.forecast.name != "gate" and not _is_auto(guesser):
            return f"the forecast {guesser.forecast.name} is made by the host"
        reasons = [Plan.supports(self.controller.policy, plan.scope)]
        for source, local in zip(self.catalog.layers, self.layers, strict=True):
            reasons.append(TritonExperts.supports(local.spec, source.layout))
        return next((reason for reason in reasons if reason), None)

    def fill_host(self) -> None:
        """Read all experts into the RAM tier in the background; until that is done the host drives."""
        if self._host_reader is None:
            return
        order = [ExpertKey(*key) for key in np.ndindex(self.shape.layers, self.shape.experts)]
        self._filler = Warmer(self._host_reader.steps(order))

    def fits(self, tokens: int) -> bool:
        """Whether passes of so many tokens are for the device: all that they may miss must find a place."""
        most = min(tokens * self.shape.top_k, self.shape.experts)
        return tokens <= MAX_TOKENS and most <= self.controller.plan.staging

    @property
    def ready(self) -> bool:
        """Whether the device can take over: the RAM tier is full, and nothing is on its way to a slot."""
        if self._filler is not None and not self._filler.busy:
            failed, self._filler = self._filler.error is not None, None
            if not failed and not self._host_is_full:  # an interrupted event has emptied slots again
                self.fill_host()
        warming = self.warmer is not None and self.warmer.busy
        return self._filler is None and not warming and not self.controller.coming and self._host_is_full

    @property
    def _host_is_full(self) -> bool:
        if not self._full:
            self._full = bool((self.host.controller.table.slot_of >= 0).all())
        return self._full

    def close(self) -> None:
        """Give back threads, files and memory."""
        if self._filler is not None:
            self._filler.stop()
        with suppress(HotsetError):  # of a device that has failed, which was said before
            self.catch_up()
        self.controller.before_change = None
        self._sides.clear()
        self._shared = None
        super().close()

    def forward(self, step: Step, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The output of one layer's experts, by whoever drives this pass."""
        side = self._side
        if side is not None and self.driving.locked() and self._thread == threading.get_ident():
            if side.recording:
                side.keep(layer, hidden, weights)
            serve = side.rehearse if self._rehearsing else side.serve
            return serve(layer, hidden, index, weights)
        with self._lock:  # until a capture under way is done
            if self._device_is_ahead:
                self.take_back()
            self._handed = None
            return super().forward(step, layer, hidden, index, weights)

    def revisit(self, layer: int, event: LiveEvent, work: Work) -> None:
        """Compute with the experts of an event once more, with the host in charge."""
        with self._lock:
            if self._device_is_ahead:
                self.take_back()
            super().revisit(layer, event, work)

    @property
    def can_guess(self) -> bool:
        """Whether the device can fetch ahead at all."""
        return self.ahead is not None and self.ahead.size >= 2 and self.next_gate is not None

    def guesses_in(self, step: Step) -> bool:
        """Whether something is fetched ahead in a step: `auto` compares steps with guesses and steps without."""
        if not self.can_guess or not isinstance(self.guesser, ForecastGuesser):
            return self.can_guess
        return not self.guesser.payoff.goes_without(step.number)

    def side_for(self, tokens: int) -> DeviceSide:
        """The kernels for passes of so many tokens."""
        with torch.inference_mode(False):  # what that mode makes, nobody may write to outside of it
            if self._shared is None:
                self._shared = self._make_shared()
                self._policy = self.controller.policy
            if tokens not in self._sides:
                self._sides[tokens] = DeviceSide(self, self._shared, tokens)
        return self._sides[tokens]

    def _make_shared(self) -> Shared:
        where = self.host.controller.table.slot_of
        if (where < 0).any():
            raise HotsetError("the RAM tier has not read all experts yet")
        shape, state = self.shape, None
        if self.ahead is not None and self.can_guess:
            self.ahead.clear()
            state = AheadState.of(self.cache.prefetch_rows, shape.layers, shape.experts, shape.top_k, self.device)
        rows = torch.from_numpy(self.cache.rows).to(self.device, copy=True)
        host_rows = torch.from_numpy(self.host.cache.rows[where]).to(self.device)
        return Shared(DeviceTable.upload(self.controller, self.device), rows, host_rows, state, self.next_gate)

    @property
    def is_outdated(self) -> bool:
        """Whether what was made on the device is for another policy than the cache has now."""
        return self._shared is not None and self._policy is not self.controller.policy

    def discard(self) -> None:
        """Give up what was made on the device; the host goes on from there."""
        with self._lock:
            self.take_back()
            self._sides.clear()
            self._shared = self._handed = None
            self._tallied = [0] * len(self._tallied)
            self.built += 1

    def alone(self) -> AbstractContextManager[Any]:
        """A context in which nobody else changes the slots; the device may be ahead of the host."""
        return self._lock

    def hand_over(self) -> None:
        """Let the device go on from where the host is, if anything but its own passes has changed the cache."""
        mark = self._changes()
        if self._shared is None or self._handed == mark:
            return
        shared, state = self._shared, self._shared.ahead
        shared.table.refresh(self.controller)
        shared.row_of.copy_(torch.from_numpy(self.cache.rows))
        if state is not None and self.ahead is not None:
            self.ahead.clear()
            rows = self.cache.prefetch_rows[: state.ahead_row.numel()]
            state.ahead_row.view(-1).copy_(torch.tensor(rows, dtype=torch.int32))
        self._handed = mark

    def _changes(self) -> tuple[Any, ...]:
        """What tells one state of the host's cache from another, events aside; warm pins go past the controller."""
        pin = None if self.supervisor is None else self.supervisor.warm_pin
        return self.controller.version, None if pin is None else (pin.state, len(pin.rounds))

    def run(
        self, step: Step, side: DeviceSide, launch: Callable[[], None], *, guessing: bool = False, timed: bool = True
    ) -> None:
        """Have the device serve a step, and read the one before it meanwhile: that is over.

        What is recorded is read at once: whoever records looks at it between passes.
        """
        with self._lock, self._minding_faults():
            self._refuse_if_broken()
            self.mend()
            self.hand_over()
            began = self.streams.moment()
            try:
                launch()
                self._note_launch(step, side, began, guessing=guessing, timed=timed)
            except BaseException:
                self.catch_up()
                if side.is_unread():  # an interrupt came after the launch
                    self._note_launch(step, side, began, guessing=guessing, timed=False)
                raise
            self._read_all(but=0 if self.recorder_of(step) is not None else 1)

    def _note_launch(self, step: Step, side: DeviceSide, began: Any, *, guessing: bool, timed: bool) -> None:
        self._served.add(step.number)
        self._device_is_ahead = True
        over = self.streams.moment()
        side.launched += 1
        recorder = self.recorder_of(step)
        self._unread.append(Unread(side, side.launched, step, began, over, guessing, timed, recorder))

    def catch_up(self) -> None:
        """Serve on the host, for its statistics, what the device has served last; waits for it."""
        with self._lock, self._minding_faults():
            self._read_all()

    def _read_all(self, but: int = 0) -> None:
        while len(self._unread) > but:
            self.streams.block_until(self._unread[0].over)
            self._read(self._unread.popleft())

    def _read(self, unread: Unread) -> None:
        missed = unread.side.read(unread.number, unread.step, unread.recorder)
        if unread.guessing and unread.side.ahead is not None:
            self._count_guesses(unread.side.tallies)
        seconds = self.streams.seconds_between(unread.began, unread.over)
        self.clock.pass_s += seconds
        if unread.timed and not self._is_of_other_kind(unread):  # else it says nothing of what guesses are worth
            evened = self._even_times(seconds, missed)
            if evened is not None:
                self.tell_guesser(unread.step, evened)

    def _is_of_other_kind(self, unread: Unread) -> bool:
        """Whether a pass would be taken for one with guesses and had none, or the other way: all was decided anew."""
        if not isinstance(self.guesser, ForecastGuesser):
            return False
        return unread.guessing == self.guesser.payoff.goes_without(unread.step.number)

    def _count_guesses(self, tallies: list[int]) -> None:
        """Add what came of guesses since the last time."""
        if self.ahead is None:
            return
        for name, now, before in zip(Tallies._fields, tallies, self._tallied, strict=True):
            setattr(self.ahead.counts, name, getattr(self.ahead.counts, name) + now - before)
        self._tallied = tallies

    def take_back(self) -> None:
        """Let the host go on from where the device is.

        The log alone does not tell: a replay may differ in the last bit of a score, and rows were exchanged for guesses
        as time had it.
        """
        with self._lock, self._minding_faults():
            self._read_all()
            if self._device_is_ahead and self._shared is not None:
                self._shared.table.download(self.controller)
                self._take_rows_back(self._shared)
            self._device_is_ahead = False

    def _take_rows_back(self, shared: Shared) -> None:
        if shared.ahead is None or self.ahead is None:
            return
        self.cache.restore_rows(shared.row_of.cpu().numpy(), shared.ahead.ahead_row.flatten().tolist())

    @contextmanager
    def _minding_faults(self) -> Iterator[None]:
        """Say in a line what the device reports; what it has done by then is unknown."""
        try:
            yield
        except RuntimeError as error:
            self._broken, self._device_is_ahead = True, False
            self._unread.clear()
            raise HotsetError(f"the GPU reported an error: {first_line(error)}; load the model again") from error

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """A context in which no event is served, and the host knows of all that were."""
        self.owner.check()  # in a child the lock may be held for ever
        with self._lock:
            if self._pins_by_itself:
                self.take_back()
            self.catch_up()
            yield

    @property
    def _pins_by_itself(self) -> bool:
        """Whether a look at the log may change the cache without telling the controller."""
        return self.supervisor is not None and self.supervisor.warm_pin is not None

    def drive(
        self, side: DeviceSide | None, *, rehearse: bool = False, guessing: bool = False, recording: bool = False
    ) -> None:
        """Have the device serve what comes through `forward`, while a step is captured, or only rehearsed."""
        if self._side is not None:
            self._side.guessing = self._side.recording = False
        self._side, self._thread, self._rehearsing = side, threading.get_ident(), rehearse
        if side is not None:
            side.guessing, side.recording = guessing, recording

    def end(self, step: Step, seconds: float) -> None:
        """Say that a step is over, or on its way, and how long it took the host."""
        if not self.owner.is_here:
            return
        with self._lock:
            if step.phase == Phase.DECODE:
                self._driver = "device" if step.number in self._served else "host"
            if self._pins_by_itself and log_is_full(self.controller.usage, self.shape):
                self.take_back()
            super().end(step, seconds)
            self._served.discard(step.number)

    def abandon(self, step: Step) -> None:
        """Say that a step was broken off."""
        super().abandon(step)
        self._served.discard(step.number)

    def note_time(self, step: Step, seconds: float) -> None:
        """Take in how long a step took; what the device serves is timed by it, and that is read later."""
        if step.number not in self._served:
            super().note_time(step, seconds)

    def driven(self) -> dict[str, str]:
        """Who drove the last decode pass."""
        return {"driven_by": self._driver}

    def settle(self) -> None:
        """Bring the clock and the statistics up to date."""
        self.catch_up()
        state = None if self._shared is None or self._broken else self._shared.ahead
        if state is not None and isinstance(self.guesser, ForecastGuesser):
            with self._minding_faults():
                self.guesser.payoff.state.budget[:-1] = state.most.cpu().numpy()
        super().settle()

    def differences(self) -> int:
        """How many experts sit elsewhere on the device than the host believes; for tests."""
        if self._shared is None:
            return 0
        mine = self._shared.table.table.slot_of.cpu().numpy()
        return int(np.count_nonzero(mine != self.controller.table.slot_of))


def _taking_back(engine: weakref.ref[GraphEngine]) -> Callable[[], None]:
    """What a controller calls before it is changed, without keeping the engine alive."""

    def take_back() -> None:
        found = engine()
        if found is not None:
            found.take_back()

    return take_back


def _is_auto(guesser: ForecastGuesser) -> bool:
    """Whether the forecast is ours to choose."""
    return bool(guesser.payoff.state.options[0])


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
