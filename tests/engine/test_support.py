"""One answer to whether the device can drive: every reason against it, in words."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from hotset import policies
from hotset.cache.plan import Scope
from hotset.engine import support
from hotset.engine.support import MAX_TOKENS, DeviceSupport
from hotset.forecasts import parse
from hotset.shape import ModelShape


def check(policy: str = "blend", scope: Scope = Scope.LAYER, **facts: object) -> list[str]:
    pytest.importorskip("triton")
    return DeviceSupport.check(policies.parse(policy), scope, [], **facts)  # type: ignore[arg-type]


def test_nothing_is_said_where_it_can() -> None:
    assert check() == []
    assert check(forecast=parse("gate")) == []


def test_all_reasons_are_told_the_first_first() -> None:
    found = check("window", page_locked=False, ram_holds_all=False, forecast=parse("best"))
    assert [next(word for word in ("lock", "--host-memory", "best", "window") if word in one) for one in found] == [
        "lock",
        "--host-memory",
        "best",
        "window",
    ]
    assert "slots shared by all layers" in check(scope=Scope.POOL)[0]


def test_without_triton_there_is_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "find_spec", lambda _: None)
    assert DeviceSupport.check(policies.parse("window"), Scope.POOL, [], page_locked=False) == ["Triton is missing"]


def test_no_policy_is_offered_that_was_not_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    (told,) = check("window")
    assert "blend" in told
    assert "nextuse" not in told
    monkeypatch.setattr(support, "LATE_HAS_RUN", True)
    assert "nextuse" in check("window")[0]


def test_a_step_must_find_rows_for_all_that_it_may_miss() -> None:
    shape = ModelShape(2, 16, 4)
    assert DeviceSupport.check_batch(2, shape, 8) == []
    (told,) = DeviceSupport.check_batch(3, shape, 8)
    assert "staging=12" in told
    assert "--staging 12" in told
    assert DeviceSupport.check_batch(5, shape, 16) == []  # no more than all experts of a layer
    assert "more than" in DeviceSupport.check_batch(MAX_TOKENS + 1, shape, 16)[0]


def test_an_encoder_decoder_model_is_the_hosts() -> None:
    assert "encoder-decoder" in check(encoder_decoder=True)[0]
