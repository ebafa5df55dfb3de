"""Models that come and go on a GPU, closed and not: nothing of one is in the way of the next."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hotset  # noqa: E402
from hotset import reference  # noqa: E402
from hotset.engine.arena import Arena, page_lock  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
IDS = torch.tensor([[5, 900, 31, 7, 410, 77]])
DEVICE = torch.device("cuda")


def greedy(model: Any, tokens: int = 24) -> Any:
    ids = IDS.to("cuda")
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, **given).cpu()


@pytest.fixture(scope="module")
def expected() -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        reference.path(), dtype=torch.float32, experts_implementation="grouped_mm"
    )
    return greedy(model.to("cuda"))


def load(**options: Any) -> Any:
    return hotset.load(reference.path(), **({"memory": "25%", "dtype": torch.float32, "device": "cuda"} | options))


@pytest.mark.parametrize("closed", [True, False])
def test_models_are_loaded_asked_at_once_and_dropped_in_a_loop(expected: Any, closed: bool) -> None:
    for turn in range(8):
        model = load(memory=("25%", "50%")[turn % 2], host_memory=("auto", "60%")[turn % 4 // 2])
        assert torch.equal(greedy(model), expected)  # while the RAM tier is still being filled
        assert model.hotset.engine.offload.pinned
        if closed:
            model.hotset.close()
        del model
        if turn % 3 == 0:
            gc.collect()  # else when it comes to it, in the middle of something
    gc.collect()
    assert torch.isin(torch.arange(4, device="cuda"), torch.arange(2, device="cuda")).tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_a_load_that_fails_half_way_leaves_no_lock_behind(expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from hotset.models import connect

    for _ in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(connect, "drive_by_device", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                load()
    gc.collect()
    model = load()
    assert model.hotset.engine.offload.pinned
    assert torch.equal(greedy(model), expected)
    model.hotset.close()


def test_a_lock_that_is_refused_leaves_no_error_for_the_next_kernel() -> None:
    arena = Arena.in_ram(4, 1 << 20)
    assert page_lock(arena, DEVICE)
    assert not page_lock(arena, DEVICE)  # these pages are locked already
    assert torch.ones(3, device="cuda").sum().item() == 3
    arena.release()
    assert page_lock(arena, DEVICE)
    arena.release()
    arena.release()
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_memory_is_unlocked_when_it_is_given_back() -> None:
    for _ in range(20):
        arena = Arena.in_ram(8, 1 << 20)  # mostly at the address of the one before
        assert page_lock(arena, DEVICE)
        view = arena.memory[:10]
        del arena
        assert view.sum().item() == 0
        del view


def test_a_graph_is_captured_after_all_others_were_dropped(expected: Any) -> None:
    model = load(engine="device")
    engine, kept = model.hotset.engine, []
    assert engine.device_decode.filler.wait(60)
    graphs = _graphs_of(model)
    for turn in range(6):
        assert torch.equal(greedy(model), expected)
        assert graphs.held
        kept += [captured.outputs for captured in graphs.held]  # what a graph wrote may outlive it
        graphs.held.clear()
        if turn % 2:
            graphs.caches.clear()
    assert model.hotset.stats()["driven_by"] == "device"
    model.hotset.close()


def _graphs_of(model: Any) -> Any:
    """The graphs behind a model's forward."""
    from hotset.models.decode_graph import DecodeGraphs

    found = [each for each in gc.get_objects() if isinstance(each, DecodeGraphs) and each.model is model]
    assert len(found) == 1
    return found[0]


def test_two_models_in_one_process_answer_by_turns(expected: Any, tmp_path: Path) -> None:
    one, other = load(memory="25%"), load(memory="50%", policy="lru")
    for turn in range(4):
        assert torch.equal(greedy(one), expected)
        assert torch.equal(greedy(other), expected)
        if turn == 2:
            one.hotset.close()
            one = load(memory="12.5%")
    for model in (one, other):
        stats = model.hotset.stats()
        assert stats["hits"] + stats["misses"] == stats["asked"]
        model.hotset.close()
