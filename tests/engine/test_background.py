"""Reading in the background: demand goes first, the text stays the same, and no failure leaves a slot in disorder."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from two_tiers import few_at_once  # noqa: E402
from two_tiers import load_two_tiers as load_on_device  # noqa: E402

import hotset  # noqa: E402
from hotset import reference  # noqa: E402
from hotset.engine.arena import poison  # noqa: E402
from hotset.errors import BudgetError  # noqa: E402
from hotset.shape import ExpertKey  # noqa: E402
from hotset.transfer import Readers, ReadTransfer  # noqa: E402
from hotset.transfer import file as store_file  # noqa: E402
from hotset.transfer.readers import Rank  # noqa: E402
from hotset.transfer.reads import Load  # noqa: E402

IDS = torch.tensor([[5, 900, 31, 7, 410, 77]])


@pytest.fixture(scope="module")
def expected() -> Any:
    from transformers import AutoModelForCausalLM

    return greedy(AutoModelForCausalLM.from_pretrained(reference.path(), dtype=torch.float32))


def greedy(model: Any, tokens: int = 40) -> Any:
    return model.generate(
        IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )


def load(kind: str) -> Any:
    if kind == "device":
        return load_on_device(128, 4, 256, few_at_once)
    model = hotset.load(reference.path(), memory="25%", dtype=torch.float32, device="cpu")
    poison(model.hotset.engine.offload.arena)
    return model


def some_order(seed: int) -> list[ExpertKey]:
    places = np.random.default_rng(seed).permutation(512).tolist()
    return [ExpertKey(*divmod(place, 64)) for place in places]


def slots_hold_their_experts(engine: Any) -> bool:
    """Every resident's slot has the bytes that a fresh read of it gives."""
    rows = engine.offload.arena.rows()
    for key in engine.controller.residents():
        used = engine.offload.catalog.layers[key.layer].layout.used_bytes
        row = int(engine.cache.rows_of(*key))
        if not np.array_equal(rows[row, :used], engine.fetch(*key)[:used]):
            return False
    return True


@pytest.mark.parametrize("kind", ["cpu", "device"])
def test_the_text_is_the_same_while_slots_are_filled(kind: str, expected: Any) -> None:
    model = load(kind)
    model.hotset.engine.preload(some_order(1), some_order(2)[:30])
    assert torch.equal(greedy(model), expected)
    assert model.hotset.wait_until_warm(60)
    assert model.hotset.stats()["resident"] == 128
    assert set(some_order(2)[:30]) <= set(model.hotset.pins())
    assert slots_hold_their_experts(model.hotset.engine)
    assert torch.equal(greedy(model), expected)
    model.hotset.close()


@pytest.mark.parametrize("kind", ["cpu", "device"])
def test_the_best_come_first_and_only_into_empty_slots(kind: str) -> None:
    model = load(kind)
    engine = model.hotset.engine
    greedy(model, 2)
    before = {key: int(engine.controller.table.slot_of[key]) for key in engine.controller.residents()}
    order = some_order(3)
    engine.preload(order)
    assert engine.offload.preloader.running.wait(60)
    table = engine.controller.table
    assert all(int(table.slot_of[key]) == slot for key, slot in before.items())
    assert not table.num_free.any()
    for layer in range(8):
        wanted = [key for key in order if key.layer == layer and key not in before]
        came = [bool(table.slot_of[key] >= 0) for key in wanted]
        assert came == sorted(came, reverse=True)
    assert engine.offload.preloader.moved_bytes == (128 - len(before)) * engine.offload.catalog.slot_bytes
    assert slots_hold_their_experts(engine)
    model.hotset.close()


@pytest.mark.parametrize("kind", ["cpu", "device"])
def test_pins_come_into_a_full_cache_and_can_be_changed(kind: str, expected: Any) -> None:
    model = load(kind)
    greedy(model)
    absent = [key for key in some_order(4) if model.hotset.engine.controller.table.slot_of[key] < 0]
    some = [key for key in absent if key.layer < 3][:12]
    assert model.hotset.pin(some) == some
    assert sorted(model.hotset.pins()) == sorted(some)
    assert torch.equal(greedy(model), expected)
    assert sorted(model.hotset.pins()) == sorted(some)
    assert slots_hold_their_experts(model.hotset.engine)
    model.hotset.unpin(some[:5])
    assert sorted(model.hotset.pins()) == sorted(some[5:])
    model.hotset.unpin()
    assert model.hotset.pins() == []
    model.hotset.close()


def test_pins_that_starve_a_layer_are_refused_before_anything_is_read() -> None:
    model = load("cpu")
    with pytest.raises(BudgetError, match=r"starve layer 2.*pin at most 8"):
        model.hotset.engine.preload([], [ExpertKey(2, expert) for expert in range(9)])
    with pytest.raises(BudgetError, match="starve layer 2"):
        model.hotset.pin([(2, expert) for expert in range(9)])
    assert model.hotset.stats()["resident"] == 0
    model.hotset.close()


@pytest.mark.parametrize("kind", ["cpu", "device"])
def test_a_disk_that_fails_in_the_background_costs_nothing_but_warmth(
    kind: str, expected: Any, monkeypatch: Any
) -> None:
    model = load(kind)
    good, left = os.preadv, threading.Semaphore(12)

    def failing(*arguments: Any) -> int:
        if threading.current_thread().name == "hotset-reader" and not left.acquire(blocking=False):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return good(*arguments)

    monkeypatch.setattr(store_file, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(store_file, "_preadv", failing)
    model.hotset.engine.preload(some_order(5))
    assert model.hotset.wait_until_warm(60)
    assert "check the disk" in model.hotset.stats()["warm_error"]
    monkeypatch.setattr(store_file, "_preadv", good)
    assert not model.hotset.engine.controller.residency.reserved
    assert slots_hold_their_experts(model.hotset.engine)
    assert torch.equal(greedy(model), expected)
    model.hotset.close()


@pytest.mark.parametrize("kind", ["cpu", "device"])
def test_closing_in_the_middle_ends_the_threads(kind: str) -> None:
    model = load(kind)
    model.hotset.engine.preload(some_order(6))
    model.hotset.close()
    assert not model.hotset.engine.offload.preloader.running.busy


def test_what_somebody_waits_for_is_read_before_what_nobody_does() -> None:
    model = load("cpu")
    engine = model.hotset.engine
    order: list[tuple[str, int]] = []
    gate = threading.Event()

    class Watched(Readers):
        def bring(self, job: Any, scratch: Any) -> None:
            gate.wait(10)
            order.append(("background" if job.load.layer == 1 else "demand", job.load.expert))
            super().bring(job, scratch)

    readers = Watched(engine.offload.catalog, engine.offload.arena.rows().__getitem__, threads=1)
    transfers = [ReadTransfer(), ReadTransfer()]
    readers.start(transfers[0], [Load(1, expert, expert) for expert in range(6)], Rank.BACKGROUND)
    readers.start(transfers[1], [Load(0, expert, 32 + expert) for expert in range(6)])
    gate.set()
    for transfer in transfers:
        landed: list[int] = []
        while len(landed) < 6:
            landed += transfer.wait_any()
    readers.close()
    model.hotset.close()
    kinds = [kind for kind, _ in order]
    assert kinds[-5:] == ["background"] * 5  # one was under way already
    assert [expert for kind, expert in order if kind == "background"] == list(range(6))
