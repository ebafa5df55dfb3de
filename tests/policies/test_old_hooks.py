"""Policies and forecasts written for earlier versions: their hooks are found under the old names, with a warning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from hotset.cache import Controller, SlotPlan
from hotset.errors import HotsetError
from hotset.forecasts import Forecast, previous
from hotset.policies import Policy, belady, lru
from hotset.shape import ModelShape
from hotset.sim.forecasting import evaluate
from hotset.trace.synth import SynthConfig, synthesise

TRACE = synthesise(SynthConfig(layers=2, experts=8, top_k=2, requests=3, prompt_tokens=0, new_tokens=12))


def test_a_policy_with_old_hooks_replays_as_one_with_new_ones() -> None:
    with pytest.warns(DeprecationWarning, match="hooks of an earlier version") as warned:

        @dataclass(frozen=True, kw_only=True)
        class OldBelady(Policy):
            """Belady as a user would have written it."""

            name: ClassVar[str] = "old-belady"
            observe: ClassVar[Any] = staticmethod(belady.observe)
            score: ClassVar[Any] = staticmethod(belady.score)
            carries: ClassVar[dict[str, str]] = {"next_use": "mean"}
            offline: ClassVar[bool] = True

            def start(self, shape: ModelShape) -> Any:
                return belady.Belady().start(shape)

            def foresee(self, state: Any, events: Any) -> Any:
                return belady.Belady().with_future(state, events)

            def foresees(self, state: Any, experts: int) -> bool:
                return belady.Belady().can_serve(state, experts)

            def shield(self, *_: Any) -> None:
                raise AssertionError("nothing calls this any more")

    assert [str(one.message) for one in warned] == [
        "OldBelady has hooks of an earlier version: foresee is with_future, foresees is can_serve, "
        "carries is persisted, shield is not called any more"
    ]
    assert OldBelady.persisted == {"next_use": "mean"}
    events, plan = TRACE.events(), SlotPlan(TRACE.shape, 6)
    old, new = (Controller(plan, policy).replay(events) for policy in (OldBelady(), belady.Belady(bypass=False)))
    assert old.misses.tolist() == new.misses.tolist()
    with pytest.raises(HotsetError, match="needs the future"):
        Controller(plan, OldBelady()).serve(next(iter(TRACE)))


def test_a_forecast_with_chances_is_judged() -> None:
    with pytest.warns(DeprecationWarning, match="chances is probabilities"):

        class OldPrevious(Forecast):
            """The forecast `previous`, with the old name of its second function."""

            name: ClassVar[str] = "old-previous"
            observe: ClassVar[Any] = staticmethod(previous.observe)
            chances: ClassVar[Any] = staticmethod(previous.probabilities)

            def start(self, shape: ModelShape) -> Any:
                return previous.Previous().start(shape)

    assert OldPrevious.probabilities is previous.probabilities
    assert evaluate(TRACE, ["previous"]).scores


def test_one_without_old_hooks_is_silent(recwarn: pytest.WarningsRecorder) -> None:
    class Mine(Policy, name="mine", observe=lru.observe, score=lru.score):
        """Nothing old."""

    assert Mine.score is lru.score
    assert not recwarn.list
