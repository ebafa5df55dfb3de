"""The logic of the GPU engine, run on the CPU: groups, halves of the staging, and the RAM tier behind slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from two_tiers import few_at_once  # noqa: E402
from two_tiers import load_two_tiers as load  # noqa: E402

from hotset import policies  # noqa: E402
from hotset.cache.controller import Controller  # noqa: E402
from hotset.cache.plan import Scope  # noqa: E402
from hotset.engine.kernels import gpu_kernels  # noqa: E402
from hotset.engine.preload import BackgroundLoader  # noqa: E402
from hotset.shape import ExpertKey  # noqa: E402
from hotset.transfer import Readers, ReadTransfer  # noqa: E402
from hotset.transfer.reads import Load  # noqa: E402


@pytest.mark.parametrize(
    ("slots", "staging", "host_slots", "kernels"),
    [  # both kernels from the smallest budget, and in turns: how slots are filled does not depend on them
        (8, 1, 64, gpu_kernels), (8, 1, 64, few_at_once), (64, 2, 64, gpu_kernels), (64, 8, 512, few_at_once),
        (128, 3, 100, few_at_once), (300, 8, 512, gpu_kernels), (504, 5, 40, few_at_once),
    ],
)  # fmt: skip
def test_a_device_with_a_ram_tier_computes_what_stock_does(
    stock: Any, slots: int, staging: int, host_slots: int, kernels: Any
) -> None:
    model = load(slots, staging, host_slots, kernels)
    generator = torch.Generator().manual_seed(slots + staging)
    with torch.no_grad():
        for length in (1, 3, 40, 1, 7):
            ids = torch.randint(10, 4000, (1, length), generator=generator)
            assert torch.allclose(model(ids).logits, stock(ids).logits, atol=1e-4)
    given = {"input_ids": torch.tensor([[5, 900, 31, 7]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**given, **options), stock.generate(**given, **options))
    stats = model.hotset.stats()
    assert stats["hits"] + stats["misses"] == stats["asked"]
    assert model.hotset.engine.offload.tier.read_bytes > 0
    model.hotset.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_that_follows_the_load_finds_a_ram_tier_that_is_still_being_filled(
    stock: Any, monkeypatch: Any, seed: int
) -> None:
    """What the background reads already takes no second slot: a tier that holds all experts has none to spare."""
    import os
    import time

    from hotset.transfer import file as store_file

    def slow(*arguments: Any) -> int:
        time.sleep(0.0005)  # the filling lasts for the whole answer
        return os.preadv(*arguments)

    monkeypatch.setattr(store_file, "_preadv", slow)
    model = load(64, 8, 512, gpu_kernels)
    engine = model.hotset.engine
    order = np.random.default_rng(seed).permutation(512).tolist()
    filler = BackgroundLoader(engine.offload.tier.loader.steps([ExpertKey(*divmod(place, 64)) for place in order]))
    given = {"input_ids": torch.tensor([[5, 900, 31, 7]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**given, **options), stock.generate(**given, **options))
    assert filler.wait(60)
    assert filler.error is None
    table = engine.offload.tier.controller.table
    assert sorted(table.slot_of.reshape(-1).tolist()) == list(range(512))
    assert not engine.offload.tier.loader.in_progress
    assert (
        engine.offload.tier.read_bytes + engine.offload.tier.loader.moved_bytes
        == 512 * engine.offload.catalog.layers[0].read_bytes(0)
    )
    for key in np.ndindex(8, 64):
        alone = engine.offload.tier.arena.rows()[table.slot_of[key]]
        assert np.array_equal(alone, reread(engine, ExpertKey(*key)))
    model.hotset.close()


def reread(engine: Any, key: ExpertKey) -> Any:
    """An expert as it comes from disk."""
    target = np.full((1, engine.offload.catalog.slot_bytes), 0xFF, np.uint8)
    readers, transfer = Readers(engine.offload.catalog, target.__getitem__, threads=1, direct=False), ReadTransfer()
    readers.start(transfer, [Load(key.layer, key.expert, 0)])
    transfer.wait_any()
    readers.close()
    return target[0]


def test_it_loads_what_the_simulator_says(stock: Any) -> None:
    model = load(128, 8, 512, few_at_once, Scope.POOL)
    live: list[Any] = []
    model.hotset.engine.stats.listen(
        lambda layer, rows: live.append(np.column_stack([np.full(len(rows), layer), rows]))
    )
    with model.hotset.trace() as recorder:
        model.generate(torch.tensor([[5, 900, 31, 7]]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    plan = model.hotset.engine.controller.plan
    replayed = Controller(plan, policies.parse("blend")).replay(recorder.finish().events(), log=True)
    assert np.array_equal(np.concatenate(live), replayed.log)
    model.hotset.close()


def test_a_failing_disk_behind_the_ram_tier_leaves_it_in_order(stock: Any, monkeypatch: Any) -> None:
    import errno
    import os

    from hotset.errors import StoreError
    from hotset.transfer import file as store_file

    model = load(64, 4, 100, gpu_kernels)
    ids = torch.arange(100, 130).unsqueeze(0)

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(store_file, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(store_file, "_preadv", broken)
    with torch.no_grad(), pytest.raises(StoreError):
        model(ids)
    monkeypatch.setattr(store_file, "_preadv", os.preadv)
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, stock(ids).logits, atol=1e-4)
    model.hotset.close()


@pytest.mark.parametrize(
    ("slots", "staging", "host_slots"), [(8, 1, 64), (64, 2, 64), (64, 8, 512), (128, 3, 100), (504, 5, 40)]
)
def test_gradients_through_a_ram_tier_are_stocks(stock: Any, slots: int, staging: int, host_slots: int) -> None:
    model = load(slots, staging, host_slots, few_at_once)
    ids = torch.tensor([[5, 900, 31, 7, 77, 1200]])
    found = []
    for one in (stock, model):
        one.zero_grad()
        one(input_ids=ids, labels=ids).loss.backward()
        found.append({name: p.grad for name, p in one.named_parameters() if p.grad is not None})
    wanted, ours = found
    assert set(ours) == set(wanted) & {name for name, _ in model.named_parameters()}
    for name, value in ours.items():
        assert (value - wanted[name]).norm() <= 1e-4 * wanted[name].norm() + 1e-7, name
    assert model.hotset.stats()["backward"]["events"] == model.hotset.engine.shape.layers
    model.hotset.close()
