"""A budget that memory does not hold is refused with the largest that it does; `auto` counts what else is needed."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hotset  # noqa: E402
from hotset import reference  # noqa: E402
from hotset.errors import BudgetError, HotsetError  # noqa: E402
from hotset.models import account, memory_plan  # noqa: E402
from hotset.options import RunOptions  # noqa: E402
from hotset.shape import Budget, ModelShape  # noqa: E402

EXPERT = 49152
ALL = 8 * 64 * EXPERT


def load(memory: Any, **options: Any) -> Any:
    return hotset.load(reference.path(), memory=memory, device="cpu", **options)


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes memory scarce: so many bytes are left for experts, once all else has its part."""

    def leave(expert_bytes: int) -> None:
        real = account.take_account

        def taken(*given: Any, **named: Any) -> account.Account:
            found = real(*given, **named)
            rest = found.dense_bytes + found.context_bytes + found.work_bytes
            return account.Account(rest + expert_bytes, found.dense_bytes, found.context_bytes, found.work_bytes)

        monkeypatch.setattr(memory_plan, "take_account", taken)

    return leave


@pytest.mark.parametrize(("memory", "unit"), [("64GiB", "MiB"), ("100%", "%"), ("500 slots", "slots")])
def test_a_budget_larger_than_free_memory_is_refused_with_one_that_works(memory: str, unit: str, scarce: Any) -> None:
    scarce(ALL // 2)
    with pytest.raises(BudgetError, match=r"needs .* and .* are free: the largest that works is --memory") as refused:
        load(memory)
    found = re.search(r'works is --memory "?([\d.]+ ?(?:MiB|%|slots))', str(refused.value))
    assert found is not None
    assert found[1].endswith(unit)
    with load(found[1]).hotset as handle:
        assert 0.9 * ALL / 2 < handle.stats()["resident_bytes"] <= ALL / 2


@pytest.mark.parametrize("memory", ["64GiB", "100%"])
def test_force_takes_it_all_the_same(memory: str, scarce: Any) -> None:
    scarce(ALL // 2)
    with load(memory, force=True).hotset as handle:
        assert handle.stats()["engine"] == "stock"


def test_where_not_even_the_smallest_budget_fits_the_remedy_is_another(scarce: Any) -> None:
    scarce(4 * EXPERT)
    with pytest.raises(BudgetError, match="close other programs, pass a smaller --context"):
        load("50%")
    with pytest.raises(BudgetError, match="memory is short: close other programs, pass a smaller --context"):
        load("auto")


def test_auto_leaves_room_for_the_context_and_for_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "memory_limit_bytes", lambda: 1 << 30)
    model = load("25%")
    with model.hotset:
        short, long = (
            account.take_account(model, torch.device("cpu"), 8, context=tokens, loaded=True) for tokens in (4096, 16384)
        )
    assert long.context_bytes - short.context_bytes == 12288 * 8 * 2 * 2 * 64 * 2
    assert account.chunk_bytes(torch.device("cpu")) < short.work_bytes < 256 << 20
    dense = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if ".experts." not in name)
    rest = dense + short.context_bytes + short.work_bytes
    monkeypatch.setattr(account, "available_memory_bytes", lambda: rest + ALL // 2)
    with load("auto").hotset as handle:
        assert 0.8 * ALL / 2 < handle.stats()["resident_bytes"] <= ALL / 2
    with pytest.raises(BudgetError, match="pass a smaller --context"):
        load("auto", context=16384)


def test_all_experts_are_loaded_by_transformers_only_where_its_pieces_fit_beside_them(scarce: Any) -> None:
    scarce(ALL + 8 * EXPERT)
    with load("100%").hotset as handle:
        assert handle.stats()["engine"] == "cpu"
        assert handle.stats()["slots"] == 512


def test_a_model_that_is_loaded_already_needs_no_memory_to_stay_whole(scarce: Any) -> None:
    from transformers import AutoModelForCausalLM

    scarce(ALL // 2)
    model = AutoModelForCausalLM.from_pretrained(reference.path())
    hotset.attach(model, memory="100%")
    assert model.hotset.stats()["engine"] == "stock"
    hotset.detach(model)
    with pytest.raises(BudgetError, match="the largest that works"):
        hotset.attach(model, memory="75%")
    assert not hasattr(model, "hotset")


def test_a_ram_tier_larger_than_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "available_memory_bytes", lambda: 256 << 20)
    shape = ModelShape(8, 64, 8, 1 << 20)
    plan = memory_plan.SlotPlan(shape, 64)
    with pytest.raises(BudgetError, match="--host-memory 100% needs 512 MiB and 128 MiB are free") as refused:
        memory_plan.host_plan(RunOptions(host_memory="100%"), plan)
    largest = re.search(r"works is --host-memory (\w+)", str(refused.value))
    assert largest is not None
    assert memory_plan.host_plan(RunOptions(host_memory=largest[1]), plan).cached > 64
    assert memory_plan.host_plan(RunOptions(host_memory="100%", force=True), plan).cached == 512


@pytest.mark.parametrize("context", [0, -1, 1 << 40, 2.5, True])
def test_an_absurd_context_is_refused(context: Any) -> None:
    with pytest.raises(HotsetError, match="context must be a whole number"):
        RunOptions(context=context)


@pytest.mark.parametrize(
    "given", [{"size_bytes": -1}, {"slots": -3}, {"fraction": float("nan")}, {"fraction": -0.5}, {"fraction": 7.0}]
)
def test_an_absurd_budget_is_refused(given: Any) -> None:
    with pytest.raises(BudgetError):
        Budget(**given)


def test_mps_where_there_is_none_is_refused_in_a_line() -> None:
    if torch.backends.mps.is_available():
        pytest.skip("there is one")
    with pytest.raises(HotsetError, match="no MPS device is here"):
        hotset.load(reference.path(), memory="25%", device="mps")
