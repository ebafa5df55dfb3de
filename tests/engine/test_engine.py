"""The engine on the CPU: in step with the simulator, safe under any load, honest about failure."""

from __future__ import annotations

import errno
import os
import threading
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import LONG, examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hotset  # noqa: E402
from hotset import policies, reference  # noqa: E402
from hotset.cache.controller import Controller  # noqa: E402
from hotset.engine.arena import poison  # noqa: E402
from hotset.errors import BudgetError, HotsetError, StoreError  # noqa: E402
from hotset.transfer import file as store_file  # noqa: E402

BOTH = ("lru", "blend", "nextuse", "static")
LIVE = [name for name in policies.names() if name not in ("belady",)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(reference.path(), padding_side="left")


def load(memory: str = "25%", **options: Any) -> Any:
    model = hotset.load(reference.path(), memory=memory, **({"dtype": torch.float32} | options))
    poison(model.hotset.engine.offload.arena)
    return model


def greedy(model: Any, given: Any, tokens: int = 10) -> Any:
    return model.generate(**given, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)


def by_turns() -> list[tuple[str, str]]:
    """Policies and scopes, which know nothing of each other: most policies take turns, some have both."""
    turns = zip(LIVE, cycle((("layer",), ("pool",))))
    return [
        (name, scope) for name, own in turns for scope in (("layer", "pool") if LONG or name in BOTH else own)
    ]  # fmt: skip


@pytest.mark.parametrize(("policy", "scope"), by_turns())
def test_replaying_a_recorded_run_gives_the_same_loads_in_the_same_order(
    policy: str, scope: str, tokenizer: Any, tmp_path: Path
) -> None:
    model = load(policy=policy, scope=scope)
    live: list[Any] = []
    model.hotset.engine.stats.listen(
        lambda layer, rows: live.append(np.column_stack([np.full(len(rows), layer), rows]))
    )
    with model.hotset.trace(tmp_path / "run.safetensors"):
        for text in ("La storia di", "int main(void) {", "The sea was"):
            greedy(model, tokenizer(text, return_tensors="pt"), 6)
        greedy(model, tokenizer(["Il mare", "for (i = 0;"], return_tensors="pt", padding=True), 3)
    stats, plan = model.hotset.stats(), model.hotset.engine.controller.plan
    model.hotset.close()
    trace = hotset.Trace.load(tmp_path / "run.safetensors")
    assert trace.requests == 5
    replayed = Controller(plan, policies.parse(policy)).replay(trace.events(), log=True)
    assert np.array_equal(np.concatenate(live), replayed.log)
    totals = replayed.counters.as_dict()
    assert {key: totals[key] for key in ("hits", "misses")} == {key: stats[key] for key in ("hits", "misses")}
    assert totals["evicted"] == stats["prefill"]["evicted"] + stats["decode"]["evicted"] > 0 or policy == "static"


@pytest.mark.parametrize("memory", ["12.5%", "25%", "50%"])
def test_padded_batches_equal_stock(memory: str, stock: Any, tokenizer: Any) -> None:
    given = tokenizer(["Il gatto", "int x = 3; return", "A long time ago in a"], return_tensors="pt", padding=True)
    model = load(memory)
    assert torch.equal(greedy(model, given), greedy(stock, given))
    stats = model.hotset.stats()
    assert stats["hits"] + stats["misses"] == stats["asked"]
    assert stats["prefill"]["hits"] + stats["decode"]["hits"] == stats["hits"]
    assert stats["tokens"] == given.input_ids.numel() + 3 * 9
    model.hotset.close()


@settings(max_examples=examples(8, 100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    slots=st.integers(8, 300),
    staging=st.integers(1, 9),
    scope=st.sampled_from(["layer", "pool"]),
    policy=st.sampled_from(["lru", "blend", "slru", "layered"]),
    batch=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_nothing_that_an_event_needs_is_ever_overwritten(
    stock: Any, slots: int, staging: int, scope: str, policy: str, batch: int, lengths: list[int], seed: int
) -> None:
    """Slots are poisoned before use, so reading one that was not filled, or filled with another expert, would show."""
    model = load(f"{slots} slots", staging=staging, scope=scope, policy=policy, threads=3)
    generator = torch.Generator().manual_seed(seed)
    for length in lengths:
        ids = torch.randint(10, 4000, (batch, length), generator=generator)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, stock(ids).logits)
    held = model.hotset.engine.resident_bytes()
    size = model.hotset.stats()["expert_bytes"]
    prefetch = {"prefetch": 4 * size} if slots < 512 else {}
    assert held == {"slots": min(slots, 512) * size, "staging": staging * size} | prefetch
    model.hotset.close()


def test_a_long_prompt_reads_every_expert_once_a_layer_and_leaves_the_hot_set(stock: Any) -> None:
    model = load("25%")
    ids = torch.randint(10, 4000, (1, 2000), generator=torch.Generator().manual_seed(3))
    greedy(model, {"input_ids": ids[:, :30]}, 12)
    hot = model.hotset.engine.controller.residents()
    model.hotset.reset_stats()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, stock(ids).logits)
    stats = model.hotset.stats()
    assert stats["prefill"]["events"] == 8
    assert stats["misses"] <= 8 * 64 - len(hot)
    assert stats["loaded_bytes"] == stats["misses"] * 49152
    assert set(hot) <= set(model.hotset.engine.controller.residents())
    model.hotset.close()


def test_a_recording_can_be_ended_by_hand_or_by_closing(tmp_path: Path) -> None:
    model = load("25%")
    ids = torch.arange(100, 110).unsqueeze(0)
    recording = model.hotset.trace(tmp_path / "one.safetensors")
    with pytest.raises(HotsetError, match="recorded already"):
        model.hotset.trace()
    model(ids)
    recording.stop()
    model(ids)
    assert hotset.Trace.load(tmp_path / "one.safetensors").tokens == 10
    model.hotset.trace(tmp_path / "two.safetensors")
    model(ids)
    model.hotset.close()
    assert hotset.Trace.load(tmp_path / "two.safetensors").steps == 1


def test_a_recording_broken_off_in_a_pass_keeps_the_whole_ones(tmp_path: Path, monkeypatch: Any) -> None:
    model = load("12.5%")
    ids = torch.arange(100, 140).unsqueeze(0)
    monkeypatch.setattr(store_file, "RETRY_PAUSE_S", 0.0)
    recording = model.hotset.trace(tmp_path / "t.safetensors")
    model(ids[:, :5])
    monkeypatch.setattr(store_file, "_preadv", Faulty(good=60, bad=10_000))
    with pytest.raises(StoreError), recording:
        model(ids)
    assert hotset.Trace.load(tmp_path / "t.safetensors").tokens == 5
    monkeypatch.setattr(store_file, "_preadv", os.preadv)
    model.hotset.close()


def test_a_full_disk_leaves_no_half_a_trace(tmp_path: Path, monkeypatch: Any) -> None:
    from hotset import files

    model = load("25%")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "_flush", full)
    with pytest.raises(HotsetError, match="free some space"), model.hotset.trace(tmp_path / "t.safetensors"):
        model(torch.arange(100, 110).unsqueeze(0))
    assert list(tmp_path.iterdir()) == []
    model.hotset.close()


def test_two_threads_can_share_a_model(stock: Any) -> None:
    model = load("12.5%")
    ids = [torch.randint(10, 4000, (1, 20), generator=torch.Generator().manual_seed(n)) for n in range(6)]
    with torch.no_grad():
        expected = [stock(each).logits for each in ids]
    found: dict[int, Any] = {}

    def work(numbers: list[int]) -> None:
        with torch.no_grad():
            for number in numbers:
                found[number] = model(ids[number]).logits

    threads = [threading.Thread(target=work, args=(part,)) for part in ([0, 2, 4], [1, 3, 5])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[number], expected[number]) for number in range(6))
    model.hotset.close()


class Faulty:
    """Reads that fail after a while, for a while."""

    def __init__(self, good: int, bad: int) -> None:
        self.good, self.bad, self.reads = good, bad, 0

    def __call__(self, handle: int, buffers: Any, offset: int) -> int:
        self.reads += 1
        if self.good < self.reads <= self.good + self.bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(handle, buffers, offset)


def test_a_read_error_stops_the_pass_and_the_next_one_is_right(monkeypatch: Any, stock: Any) -> None:
    model = load("25%")
    ids = torch.arange(100, 130).unsqueeze(0)
    monkeypatch.setattr(store_file, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(store_file, "_preadv", Faulty(good=40, bad=10_000))
    with torch.no_grad(), pytest.raises(StoreError, match=r"model\.safetensors at byte [\d,]+ failed.*check the disk"):
        model(ids)
    monkeypatch.setattr(store_file, "_preadv", os.preadv)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, stock(ids).logits)
    model.hotset.close()


def test_a_passing_read_error_is_retried(monkeypatch: Any, stock: Any) -> None:
    model = load("25%")
    ids = torch.arange(100, 130).unsqueeze(0)
    monkeypatch.setattr(store_file, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(store_file, "_preadv", Faulty(good=5, bad=2))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, stock(ids).logits)
    model.hotset.close()


def test_an_interrupt_leaves_the_cache_in_order(monkeypatch: Any, stock: Any) -> None:
    from hotset.transfer.reads import ReadTransfer

    model = load("25%")
    ids = torch.arange(100, 130).unsqueeze(0)
    take, calls = ReadTransfer.wait_any, []

    def interrupted(self: Any) -> Any:
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return take(self)

    monkeypatch.setattr(ReadTransfer, "wait_any", interrupted)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(ids)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, stock(ids).logits)
    model.hotset.close()


def test_budgets_that_cannot_work_name_the_smallest_that_does() -> None:
    with pytest.raises(BudgetError, match=r"smallest budget that works is 8 slots, or \d"):
        load("100KiB")
    with pytest.raises(HotsetError, match="cannot read the budget"):
        load("a lot")
    with pytest.raises(HotsetError, match="scope"):
        load(scope="galaxy")
    with pytest.raises(HotsetError, match="no CUDA device" if not torch.cuda.is_available() else "zzz|no device"):
        load(device="cuda" if not torch.cuda.is_available() else "nonsense")


def test_a_budget_in_bytes_is_never_exceeded() -> None:
    for budget in ("2MiB", "5MB", "9000000"):
        model = load(budget)
        from hotset.shape import parse_size

        assert model.hotset.stats()["resident_bytes"] <= parse_size(budget)
        model.hotset.close()


def test_an_allocation_that_is_refused_is_explained(monkeypatch: Any) -> None:
    from hotset.engine import arena

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(arena, "Block", refuse)
        with pytest.raises(BudgetError, match=r"refused .* smaller --memory"):
            load("25%")
    monkeypatch.setattr(arena, "available_memory_bytes", lambda: 1000)
    with pytest.raises(BudgetError, match="are available: ask for a smaller --memory"):
        load("25%")


def test_a_checkpoint_truncated_under_the_engine_is_noticed(tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(reference.path(), folder)
    model = hotset.load(folder, memory="25%")
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # transformers leaves these in the mapped file
    os.truncate(folder / "model.safetensors", 20_000_000)
    with torch.no_grad(), pytest.raises(StoreError, match=r"truncated"):
        model(torch.arange(100, 160).unsqueeze(0))
    model.hotset.close()
    with pytest.raises(StoreError, match="truncated"):
        hotset.load(folder, memory="25%")
