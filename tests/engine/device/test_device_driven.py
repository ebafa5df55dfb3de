"""Models driven by the device, through the public way in: stock's text, the simulator's books, all paths mixed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

import hotset  # noqa: E402
from hotset import policies, reference  # noqa: E402
from hotset.cache.controller import Controller  # noqa: E402
from hotset.engine import support  # noqa: E402
from hotset.engine.arena import poison  # noqa: E402
from hotset.errors import HotsetError  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
FAMILIES = {
    "qwen3_moe": {}, "olmoe": {}, "mixtral": {"sliding_window": 8}, "deepseek_v2": {}, "deepseek_v3": {},
    "gpt_oss": {"sliding_window": 8}, "glm4_moe": {},
}  # fmt: skip
POLICIES = ["lru", "lfu", "slru", "lfru", "decay", "blend", "lru:admit=late", "blend:admit=late", "nextuse"]
PROMPT = "La storia della città di Roma"
TEXTS = [PROMPT, "int main(void) {", "Der Wald ist im Winter", "def fibonacci(n):\n    if n < 2:"]
DEVICE = "cuda"
TOP_K = 8  # of the reference model


@pytest.fixture(scope="module", autouse=True)
def _untimed() -> Iterator[None]:
    """Take the first choice for every kernel: to compile and time them all takes minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTSET_TUNE", "0")
        patch.setattr(support, "LATE_HAS_RUN", True)
        yield


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every graph that is captured from here on."""
    from hotset.engine.device import capture

    seen: list[Any] = []
    plain = capture.recorded

    def recorded(step: Any, pool: Any) -> Any:
        seen.append(step)
        return plain(step, pool)

    monkeypatch.setattr(capture, "recorded", recorded)
    return seen


def load(path: Any = None, **options: Any) -> Any:
    """A model that the device drives; slots and the RAM tier are poisoned before anything is read into them."""
    from hotset.engine.device.decode import DeviceDecode

    plain = DeviceDecode.__init__

    def poisoned(decode: Any, *parts: Any, **options: Any) -> None:
        plain(decode, *parts, **options)
        poison(decode.steps.parts.arena)
        poison(decode.steps.parts.host_arena)

    given = {"memory": "25%", "dtype": torch.float32, "prefetch": "off", "engine": "device", "device": DEVICE}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceDecode, "__init__", poisoned)
        model = hotset.load(str(path or reference.path()), **given | options)
    assert model.hotset.engine.device_decode.filler.wait(60)
    return model


def driven(model: Any) -> dict[str, Any]:
    """The statistics of a model, once it is certain that the device drove it and agrees with the host."""
    stats: dict[str, Any] = model.hotset.stats()
    engine = model.hotset.engine
    assert stats["driven_by"] == "device"
    assert engine.device_decode.steps.differences() == 0
    assert stats["hits"] + stats["misses"] == stats["asked"]
    assert stats["decode"]["misses"] > 0
    return stats


def stock_of(path: Any, implementation: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation=implementation)
    return model.to(DEVICE).eval()


def text(model: Any, ids: Any, tokens: int, mask: Any = None, **options: Any) -> list[list[int]]:
    given = {"attention_mask": torch.ones_like(ids) if mask is None else mask, "pad_token_id": 0, "do_sample": False}
    given |= {"max_new_tokens": tokens, "min_new_tokens": tokens} | options
    found: list[list[int]] = model.generate(ids, **given).tolist()
    return found


@pytest.fixture(scope="module")
def stock() -> Any:
    return stock_of(reference.path(), "grouped_mm")


@pytest.fixture(scope="module")
def shared() -> Iterator[Any]:
    """A quarter of the reference model, with room for four sequences; each test finds it as the last one left it."""
    model = load(staging=4 * TOP_K)
    yield model
    model.hotset.close()


def ids_of(tokenizer: Any, words: str = PROMPT) -> Any:
    return tokenizer(words, return_tensors="pt").input_ids.to(DEVICE)


def batch_of(tokenizer: Any, texts: list[str]) -> tuple[Any, Any]:
    """Prompts of different lengths, padded on the left, and their mask."""
    rows = [tokenizer(words).input_ids for words in texts]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=DEVICE)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=DEVICE)
    assert not mask.all()
    return ids, mask


def test_a_quarter_says_what_stock_says(tokenizer: Any, stock: Any, shared: Any) -> None:
    shared.hotset.reset_stats()
    assert text(shared, ids_of(tokenizer), 96) == text(stock, ids_of(tokenizer), 96)
    stats = driven(shared)
    assert stats["decode"]["hits"] + stats["decode"]["misses"] == 95 * 8 * TOP_K


@pytest.mark.parametrize(("memory", "prefetch"), [("12.5%", "off"), ("50%", "off"), ("25%", "gate")])
def test_other_sizes_and_prefetch_say_what_stock_says(tokenizer: Any, stock: Any, memory: str, prefetch: str) -> None:
    model = load(memory=memory, prefetch=prefetch)
    assert text(model, ids_of(tokenizer), 96) == text(stock, ids_of(tokenizer), 96)
    driven(model)
    prefetcher = model.hotset.engine.offload.prefetcher
    assert (prefetcher is not None) == (prefetch == "gate")
    assert (
        prefetcher is None
        or prefetcher.counts.in_time_bytes + prefetcher.counts.late_bytes + prefetcher.counts.wasted_bytes > 0
    )
    model.hotset.close()


def test_two_answers_in_a_row_share_a_graph(tokenizer: Any, stock: Any, shared: Any, captures: list[Any]) -> None:
    for words in (PROMPT, TEXTS[1]):
        expected = text(stock, ids_of(tokenizer, words), 12)
        assert text(shared, ids_of(tokenizer, words), 12) == expected
        first = len(captures)
        assert text(shared, ids_of(tokenizer, words), 12) == expected
        assert len(captures) == first
    assert len(captures) <= 1
    driven(shared)


def test_prompts_of_any_length(tokenizer: Any, stock: Any, shared: Any, captures: list[Any]) -> None:
    """The longest does not fit into the smallest cache, so it has one of its own, and a graph."""
    words = " ".join(prompt.text for name in ("it", "en_prose", "c") for prompt in reference.workload(name).prompts)
    long = ids_of(tokenizer, words)
    assert long.shape[1] >= 700
    for length in (1, 2, 37, 700):
        assert text(shared, long[:, :length], 16) == text(stock, long[:, :length], 16), length
    assert 1 <= len(captures) <= 2
    driven(shared)


@pytest.mark.parametrize("size", [2, 4])
def test_batches(tokenizer: Any, stock: Any, shared: Any, captures: list[Any], size: int) -> None:
    ids, mask = batch_of(tokenizer, TEXTS[:size])
    assert text(shared, ids, 32, mask) == text(stock, ids, 32, mask)
    assert captures, "the host drove"
    driven(shared)


def test_sampling_draws_what_stock_draws(tokenizer: Any, stock: Any, shared: Any) -> None:
    found = []
    for model in (stock, shared, shared):
        torch.manual_seed(11)
        found.append(text(model, ids_of(tokenizer), 48, do_sample=True, temperature=0.8, top_k=50))
    assert found[0] == found[1] == found[2]
    assert found[0] != text(stock, ids_of(tokenizer), 48)
    driven(shared)


def test_a_chat_mixes_the_ways(tokenizer: Any, stock: Any, shared: Any) -> None:
    """An answer, then other work by the host, then the next turn of the same chat."""
    from transformers import DynamicCache

    ids, other = ids_of(tokenizer), ids_of(tokenizer, TEXTS[3])
    turn = text(shared, ids, 16)
    assert turn == text(stock, ids, 16)
    with torch.no_grad():
        assert (shared(other).logits - stock(other).logits).abs().max() < 1e-3
    by_host = text(shared, other, 8, past_key_values=DynamicCache(config=shared.config))
    assert by_host == text(stock, other, 8)
    ids = torch.cat([torch.tensor(turn, device=DEVICE), other], dim=1)
    assert text(shared, ids, 16) == text(stock, ids, 16)
    driven(shared)


def test_pins_change_between_answers(tokenizer: Any, stock: Any, shared: Any) -> None:
    ids = ids_of(tokenizer)
    expected = text(stock, ids, 32)
    assert text(shared, ids, 32) == expected
    slot_of = shared.hotset.engine.controller.table.slot_of
    with shared.hotset.engine.paused():
        absent = [(layer, e) for layer in (0, 5) for e in range(64) if slot_of[layer, e] < 0]
    absent = absent[:3] + absent[-3:]
    shared.hotset.pin(absent)
    assert text(shared, ids, 32) == expected
    driven(shared)
    assert sorted(shared.hotset.pins()) == sorted(absent)
    on_device = shared.hotset.engine.device_decode.steps.state.table.table.slot_of.cpu()
    assert all(on_device[key] >= 0 for key in absent)
    shared.hotset.unpin()
    assert text(shared, ids, 32) == expected
    driven(shared)
    assert shared.hotset.pins() == []


def test_a_warm_start(tokenizer: Any, stock: Any, shared: Any, tmp_path: Path) -> None:
    """From what another model has learnt; the first answer may come before all is there."""
    ids = ids_of(tokenizer)
    expected = text(stock, ids, 32)
    assert text(shared, ids, 32) == expected
    profile = shared.hotset.save_profile(tmp_path / "learnt.safetensors")
    model = load(profile=str(profile), pin="20%")
    assert text(model, ids, 32) == expected
    assert model.hotset.wait_until_warm(60)
    assert text(model, ids, 32) == expected
    stats, pins = driven(model), model.hotset.pins()
    on_device = model.hotset.engine.device_decode.steps.state.table.table.slot_of.cpu()
    model.hotset.close()
    assert len(pins) == 24
    assert all(on_device[key] >= 0 for key in pins)
    assert stats["background_bytes"] > 0
    assert stats["warm_error"] is None


def test_bfloat16_is_finite(tokenizer: Any) -> None:
    model, seen = load(dtype=torch.bfloat16), []

    def look(_: Any, scores: Any) -> Any:
        seen.append(bool(scores[:, 1:].isfinite().all()))  # the end of the text, 0, is forbidden
        return scores

    text(model, ids_of(tokenizer), 48, logits_processor=[look])
    driven(model)
    model.hotset.close()
    assert seen == [True] * 48


@pytest.mark.parametrize("policy", POLICIES)
def test_replaying_the_recorded_run_gives_the_same_loads(tokenizer: Any, policy: str, tmp_path: Path) -> None:
    model = load(policy=policy)
    with model.hotset.trace(tmp_path / "t.safetensors"):
        for words in TEXTS[:2]:
            text(model, ids_of(tokenizer, words), 32)
    stats = driven(model)
    engine = model.hotset.engine
    plan, residents = engine.controller.plan, engine.controller.residents()
    model.hotset.close()
    again = Controller(plan, policies.parse(policy))
    counted = again.replay(hotset.Trace.load(tmp_path / "t.safetensors").events()).counters.as_dict()
    assert (counted["hits"], counted["misses"]) == (stats["hits"], stats["misses"])
    assert again.residents() == residents


@pytest.mark.parametrize("prefetch", ["off", "gate"])
@pytest.mark.parametrize("policy", ["blend:admit=late", "nextuse"])
def test_four_requests_with_late_admission(
    tokenizer: Any, stock: Any, policy: str, prefetch: str, tmp_path: Path
) -> None:
    """What an event evicts of its own computes first; a replay of the recording loads the same."""
    ids, mask = batch_of(tokenizer, TEXTS)
    expected = text(stock, ids, 48, mask)
    model = load(policy=policy, memory="12.5%", prefetch=prefetch, staging=4 * TOP_K)
    with model.hotset.trace(tmp_path / "t.safetensors"):
        assert text(model, ids, 48, mask) == expected
        assert text(model, ids_of(tokenizer), 16) == text(stock, ids_of(tokenizer), 16)
    stats, engine = driven(model), model.hotset.engine
    cache, residents = engine.cache, engine.controller.residents()
    cache.reclaim()
    held = [*cache.rows.tolist(), *cache.staging]
    assert len({*held, *cache.prefetch_rows}) == cache.num_rows
    assert not cache.staging_in_order
    model.hotset.close()
    again = Controller(engine.controller.plan, policies.parse(policy))
    counted = again.replay(hotset.Trace.load(tmp_path / "t.safetensors").events()).counters.as_dict()
    assert (counted["hits"], counted["misses"]) == (stats["hits"], stats["misses"])
    assert again.residents() == residents


@pytest.mark.parametrize("family", FAMILIES)
def test_families_say_what_stock_says(family: str, tmp_path: Path) -> None:
    import tiny_models as tiny

    with tiny.quiet():
        tiny.make(family, **FAMILIES[family]).save_pretrained(tmp_path)
        stock, model = stock_of(tmp_path, "eager"), load(tmp_path, memory="50%")
        ids = torch.tensor([[5, 90, 31, 7, 41, 77]], device=DEVICE)
        found, expected = text(model, ids, 24), text(stock, ids, 24)
    driven(model)
    model.hotset.close()
    assert found == expected


def test_what_the_device_cannot_drive_is_refused_or_said() -> None:
    options = {"memory": "25%", "device": DEVICE}
    with pytest.raises(HotsetError, match="window"):
        hotset.load(str(reference.path()), policy="window", engine="device", **options)
    for reason, other in (("window", {"policy": "window"}), ("RAM tier", {"host_memory": "30%"})):
        model = hotset.load(str(reference.path()), **options, **other)
        said = [note for note in model.hotset.notes if "the host drives the GPU" in note]
        model.hotset.close()
        assert len(said) == 1
        assert reason in said[0]
        assert "\n" not in said[0]
