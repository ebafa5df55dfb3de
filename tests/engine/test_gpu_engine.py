"""The engine on a GPU: exact, in step with the simulator, and never computing on what was not loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hotset  # noqa: E402
from hotset import reference  # noqa: E402
from hotset.engine.arena import poison  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
PROMPT = "La storia della città di Roma"


def stock(dtype: Any, implementation: str = "grouped_mm") -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(reference.path(), dtype=dtype, experts_implementation=implementation)
    return model.to("cuda")


def prompt(tokenizer: Any, text: str = PROMPT) -> Any:
    return tokenizer(text, return_tensors="pt").to("cuda")


@pytest.mark.parametrize("memory", ["12.5%", "25%", "50%"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_close_to_stock(tokenizer: Any, memory: str, dtype: str) -> None:
    kind = getattr(torch, dtype)
    ids = prompt(tokenizer)
    expected = stock(kind)(**ids).logits
    model = hotset.load(reference.path(), memory=memory, dtype=kind, device="cuda")
    poison(model.hotset.engine.offload.arena)
    found = model(**ids).logits
    tolerance = 1e-3 if dtype == "float32" else 0.25
    assert torch.isfinite(found).all()
    assert (found - expected).abs().max() < tolerance
    model.hotset.close()


@pytest.mark.parametrize("memory", ["12.5%", "25%", "50%"])
def test_greedy_text_equals_stock_in_float32(tokenizer: Any, memory: str) -> None:
    ids = prompt(tokenizer)
    expected = stock(torch.float32).generate(**ids, max_new_tokens=128, do_sample=False)
    model = hotset.load(reference.path(), memory=memory, dtype=torch.float32, device="cuda")
    poison(model.hotset.engine.offload.arena)
    found = model.generate(**ids, max_new_tokens=128, do_sample=False)
    stats = model.hotset.stats()
    model.hotset.close()
    assert torch.equal(found, expected)
    assert stats["engine"] == "cuda"
    assert stats["hits"] + stats["misses"] == stats["asked"]
    assert stats["misses"] > 0


def test_a_small_ram_tier_reads_from_disk_and_stays_exact(tokenizer: Any) -> None:
    ids = prompt(tokenizer)
    expected = stock(torch.float32).generate(**ids, max_new_tokens=64, do_sample=False)
    model = hotset.load(
        reference.path(), memory="12.5%", host_memory="20%", dtype=torch.float32, device="cuda", staging=2
    )
    found = model.generate(**ids, max_new_tokens=64, do_sample=False)
    assert model.hotset.engine.offload.tier.read_bytes > 0
    model.hotset.close()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "decay", "blend"])
def test_replaying_the_recorded_run_gives_the_same_loads(tokenizer: Any, policy: str, tmp_path: Any) -> None:
    model = hotset.load(reference.path(), memory="25%", policy=policy, dtype=torch.bfloat16, device="cuda")
    live: list[np.ndarray] = []
    model.hotset.engine.stats.listen(
        lambda layer, loads: live.append(np.column_stack([np.full(len(loads), layer), loads]))
    )
    with model.hotset.trace(tmp_path / "t.safetensors"):
        for text in (PROMPT, "int main(void) {"):
            model.generate(**prompt(tokenizer, text), max_new_tokens=32, do_sample=False)
    stats = model.hotset.stats()
    plan = model.hotset.engine.controller.plan
    model.hotset.close()
    from hotset import policies
    from hotset.cache.controller import Controller

    replayed = Controller(plan, policies.parse(policy)).replay(
        hotset.Trace.load(tmp_path / "t.safetensors").events(), log=True
    )
    assert np.array_equal(np.concatenate(live), replayed.log)
    assert replayed.counters.as_dict()["hits"] == stats["hits"]


@pytest.mark.parametrize("host_memory", ["auto", "40%"])
def test_a_warm_start_fills_the_device_while_it_computes(tokenizer: Any, host_memory: str, tmp_path: Any) -> None:
    expected = stock(torch.float32).generate(**prompt(tokenizer), max_new_tokens=64, do_sample=False)
    options = {"memory": "25%", "host_memory": host_memory, "dtype": torch.float32, "device": "cuda"}
    cold = hotset.load(reference.path(), learn=str(tmp_path / "p.safetensors"), **options)
    assert torch.equal(cold.generate(**prompt(tokenizer), max_new_tokens=64, do_sample=False), expected)
    cold.hotset.close()
    model = hotset.load(reference.path(), profile=str(tmp_path / "p.safetensors"), pin="20%", **options)
    poisoned = model.generate(**prompt(tokenizer), max_new_tokens=64, do_sample=False)
    assert model.hotset.wait_until_warm(60)
    again = model.generate(**prompt(tokenizer), max_new_tokens=64, do_sample=False)
    stats, pins = model.hotset.stats(), model.hotset.pins()
    engine = model.hotset.engine
    engine.controller.residency.changing()  # what the device has moved since is known to the host from here on
    rows, used = engine.offload.mover._rows.cpu().numpy(), engine.offload.catalog.layers[0].layout.used_bytes
    for key in engine.controller.residents():
        row = int(engine.cache.rows_of(*key))
        assert np.array_equal(rows[row, :used], engine.fetch(*key)[:used])
    model.hotset.close()
    assert torch.equal(poisoned, expected)
    assert torch.equal(again, expected)
    assert len(pins) == 24
    assert stats["background_bytes"] > 0
    assert stats["warm_error"] is None
    assert stats["hits"] + stats["misses"] == stats["asked"]


def test_pins_change_on_a_running_device(tokenizer: Any) -> None:
    expected = stock(torch.float32).generate(**prompt(tokenizer), max_new_tokens=32, do_sample=False)
    model = hotset.load(reference.path(), memory="25%", host_memory="30%", dtype=torch.float32, device="cuda")
    model.generate(**prompt(tokenizer), max_new_tokens=32, do_sample=False)
    absent = [(0, e) for e in range(64) if model.hotset.engine.controller.table.slot_of[0, e] < 0][:6]
    model.hotset.pin(absent)
    assert sorted(model.hotset.pins()) == sorted(absent)
    assert torch.equal(model.generate(**prompt(tokenizer), max_new_tokens=32, do_sample=False), expected)
    model.hotset.unpin()
    assert model.hotset.pins() == []
    model.hotset.close()
