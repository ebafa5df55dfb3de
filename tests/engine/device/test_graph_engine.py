"""The engine that the device drives: the text is stock's, the host's books are the device's, and all paths mix.

Without a GPU the kernels run in Triton's interpreter, and a step is run again instead of being captured.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton")

import tiny_device  # noqa: E402
from tiny_device import DEVICE  # noqa: E402

from hotset.engine.device import capture  # noqa: E402
from hotset.engine.support import DeviceSupport  # noqa: E402
from hotset.errors import HotsetError  # noqa: E402
from hotset.models import static_caches  # noqa: E402
from hotset.models.decode_graph import DecodeGraphs  # noqa: E402
from hotset.models.static_caches import static_cache  # noqa: E402

pytestmark = [
    pytest.mark.skipif(tiny_device.LATE, reason="the interpreter came too late"),
    pytest.mark.filterwarnings("ignore"),
]
IDS = torch.tensor([[5, 90, 31, 7, 41, 77]], device=DEVICE)
NEW = 24 if CUDA else 6
LAYERS, EXPERTS, TOP_K = 3, 16, 4


@pytest.fixture(autouse=True)
def _no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_device.go_without_graphs(monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    FOLDER[0] = tiny_device.make(tmp_path_factory.mktemp("graph") / "tiny", LAYERS, EXPERTS, TOP_K)
    return FOLDER[0]


FOLDER = [Path()]


@pytest.fixture(scope="module")
def stock(folder: Path) -> Any:
    return tiny_device.stock_of(folder)


def load(slots: int, policy: str = "blend", staging: int = TOP_K, install: bool = True) -> Any:
    return tiny_device.load(FOLDER[0], slots, policy, staging, install=install)


def greedy(model: Any, tokens: int = NEW, ids: Any = IDS, **options: Any) -> list[list[int]]:
    return tiny_device.greedy(model, tokens, ids, **options)


@pytest.mark.parametrize(("slots", "policy"), [(24, "blend"), (12, "lru"), (30, "lfu")])
def test_the_text_is_that_of_the_stock_model_and_the_books_are_those_of_the_device(
    stock: Any, slots: int, policy: str
) -> None:
    model = load(slots, policy)
    engine = model.hotset.engine
    assert greedy(model) == greedy(stock)
    stats = model.hotset.stats()
    assert len(model.graphs.held) == 1
    assert engine.device_decode.steps.differences() == 0
    assert stats["decode"]["hits"] + stats["decode"]["misses"] == (NEW - 1) * LAYERS * TOP_K
    assert stats["hits"] + stats["misses"] == stats["asked"]
    assert stats["loaded_bytes"] > 0
    model.hotset.close()


def test_once_all_experts_are_resident_steps_fetch_nothing(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(LAYERS * EXPERTS, "lru")
    decode = model.hotset.engine.device_decode
    assert greedy(model, 3) == greedy(stock, 3)
    assert not decode.all_resident
    for seed in range(40):  # prompts, until they have asked for all of them
        random = torch.Generator().manual_seed(seed)
        greedy(model, 1, torch.randint(128, (1, 100), generator=random).to(DEVICE))
        model.hotset.stats()
        if decode.all_resident:
            break
    assert decode.all_resident
    loaded = model.hotset.stats()["loaded_bytes"]
    monkeypatch.setattr(decode.steps.kernels_for(1), "_copy", None)  # it would fail
    assert greedy(model) == greedy(stock)
    assert sorted(captured.variant.resident for captured in model.graphs.held) == [False, True]
    stats = model.hotset.stats()
    assert stats["loaded_bytes"] == loaded
    assert stats["driven_by"] == "device"
    assert decode.steps.differences() == 0
    model.hotset.engine.controller.table.slot_of[0, 3] = -1
    assert not decode.all_resident
    model.hotset.engine.controller.table.slot_of[0, 3] = 3
    model.hotset.close()


def test_the_host_serves_what_the_host_would_have_served(stock: Any) -> None:
    """The same run by the host alone leaves the same residents and the same counts."""
    found = []
    for install in (True, False):
        model = load(24, install=install)
        greedy(model)
        stats = model.hotset.stats()
        residents = model.hotset.engine.controller.residents()
        found.append((residents, stats["decode"]["hits"], stats["decode"]["misses"], stats["loaded_bytes"]))
        model.hotset.close()
    assert found[0] == found[1]


def test_a_second_answer_uses_the_same_graph_and_turns_mix_with_prompts(stock: Any) -> None:
    model = load(24)
    other = torch.tensor([[9, 8, 7]], device=DEVICE)
    assert greedy(model, 3) == greedy(stock, 3)
    assert greedy(model, 3, other) == greedy(stock, 3, other)
    assert greedy(model, 3) == greedy(stock, 3)
    assert len(model.graphs.held) == 1
    model.hotset.stats()
    assert model.hotset.engine.device_decode.steps.differences() == 0
    model.hotset.close()


def test_a_cache_that_is_not_static_goes_the_hosts_way(stock: Any) -> None:
    from transformers import DynamicCache

    model = load(24)
    assert greedy(model, 3, past_key_values=DynamicCache(config=model.config)) == greedy(stock, 3)
    assert not model.graphs.held
    model.hotset.close()


def test_more_tokens_than_staging_holds_go_the_hosts_way(stock: Any) -> None:
    ids = torch.tensor([[5, 90, 31], [7, 41, 77]], device=DEVICE)
    model = load(24)
    assert DeviceSupport.check_batch(2, model.hotset.engine.shape, TOP_K)
    assert greedy(model, 3, ids) == greedy(stock, 3, ids)
    assert not model.graphs.held
    assert [note for note in model.hotset.notes if "staging=8" in note] == model.hotset.notes[:1]
    model.hotset.close()


def test_a_batch_is_served_by_the_device_where_it_fits(stock: Any) -> None:
    ids = torch.tensor([[5, 90, 31], [7, 41, 77]], device=DEVICE)
    model = load(24, staging=2 * TOP_K)
    assert greedy(model, 3, ids) == greedy(stock, 3, ids)
    assert len(model.graphs.held) == 1
    model.hotset.stats()
    assert model.hotset.engine.device_decode.steps.differences() == 0
    model.hotset.close()


def test_until_the_ram_tier_is_full_the_host_drives(stock: Any) -> None:
    model = load(24, install=False)
    graphs = DecodeGraphs(model, model.hotset.engine.device_decode, model.hotset.tracker, model.hotset.static_caches)
    undo = graphs.install()
    assert not model.hotset.engine.device_decode.ready
    assert greedy(model, 3) == greedy(stock, 3)
    assert not graphs.held
    undo()
    assert "forward" not in model.__dict__
    assert "generate" not in model.__dict__
    model.hotset.close()


def test_what_cannot_be_driven_says_why() -> None:
    model = load(24, "window", install=False)
    assert "window" in model.hotset.engine.device_decode.unsupported_reasons()[0]
    model.hotset.close()
    model = load(24, install=False)
    model.hotset.engine.device_decode.page_locked = False
    assert "lock" in model.hotset.engine.device_decode.unsupported_reasons()[0]
    model.hotset.close()


def test_too_little_staging_is_refused_before_anything_runs() -> None:
    model = load(24, staging=3)
    with pytest.raises(HotsetError, match="staging"):
        model.hotset.engine.device_decode.steps.kernels_for(1)
    model.hotset.close()


def test_windows_become_masks() -> None:
    from transformers import GptOssConfig

    config = GptOssConfig(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=4)
    cache = static_cache(config, 32)
    assert [type(layer).__name__ for layer in cache.layers] == ["StaticLayer", "StaticLayer"]
    assert [layer.max_cache_len for layer in cache.layers] == [32, 32]


def test_a_closed_pool_has_no_caches_and_keeps_none(stock: Any) -> None:
    pool = static_caches.KVCachePool(stock.config)
    assert pool.acquire(1, 10) is None
    pool.open()
    cache = pool.acquire(1, 10)
    pool.close()  # the device gave up while it was in use
    pool.release(cache)
    assert len(pool) == 0
    assert pool.acquire(1, 10) is None


def test_graphs_and_caches_are_bounded(stock: Any) -> None:
    model = load(24)
    for tokens in (2, 600, 1100, 2100, 4200, 8200):
        cache = model.graphs.caches.acquire(1, tokens)
        model.graphs.caches.release(cache)
        assert np.log2(cache.layers[0].max_cache_len) % 1 == 0
        assert cache.layers[0].max_cache_len >= max(tokens, 512)
    assert len(model.graphs.caches) == static_caches.MAX_CACHES
    model.hotset.close()


def test_a_cache_is_lent_to_one_call_at_a_time(stock: Any) -> None:
    model = load(24)
    first, second = model.graphs.caches.acquire(1, 10), model.graphs.caches.acquire(1, 10)
    assert first is not second
    model.graphs.caches.release(first)
    assert model.graphs.caches.acquire(1, 10) is first
    assert greedy(model, 3) == greedy(stock, 3)
    assert len(model.graphs.caches) == 1
    model.hotset.close()


def test_a_full_cache_can_be_captured(stock: Any) -> None:
    """There is room for the token that is computed, and for no other."""
    model = load(24)
    tokens = 2
    cache = static_cache(model.config, IDS.shape[1] + tokens - 1)
    assert greedy(model, tokens, past_key_values=cache) == greedy(stock, tokens)
    assert len(model.graphs.held) == 1
    model.hotset.close()


def test_calls_that_are_never_alike_are_not_captured_for_ever(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MAX_IN_A_ROW", 1)
    model, cache = load(24), None
    cache = static_cache(model.config, 16)
    with torch.no_grad():
        model(input_ids=IDS, past_key_values=cache, use_cache=True)
        for extra in range(3):  # a mask that grows is another shape each time
            mask = torch.ones((1, IDS.shape[1] + extra + 1), device=DEVICE, dtype=torch.int64)
            model(input_ids=IDS[:, :1], attention_mask=mask, past_key_values=cache, use_cache=True)
    assert len(model.graphs.held) == 1
    model.hotset.close()


def test_both_modes_of_inference_share_what_lies_on_the_device(stock: Any) -> None:
    model = load(24)
    with torch.inference_mode():
        assert greedy(model, 3) == greedy(stock, 3)
    assert greedy(model, 3) == greedy(stock, 3)
    assert model.graphs.unsupported_reason is None
    assert len(model.graphs.held) == 2
    model.hotset.close()
