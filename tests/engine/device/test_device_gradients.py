"""Gradients where the device drives decode: the host serves training steps, and both go on from one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

import tiny_device  # noqa: E402

from hotset.models.static_caches import static_cache  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(tiny_device.LATE, reason="Triton was imported before its interpreter was asked for"),
]
IDS = torch.tensor([[5, 90, 31, 7, 41]], device=tiny_device.DEVICE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_device.go_without_graphs(monkeypatch)
    return tiny_device.make(tmp_path, layers=2, experts=8, top_k=2)


def gradients(model: Any) -> dict[str, Any]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(model: Any, stock: Any) -> None:
    found, wanted = gradients(model), gradients(stock)
    assert set(found) == set(wanted) & {name for name, _ in model.named_parameters()}
    for name, value in found.items():
        assert (value - wanted[name]).norm() <= 1e-4 * wanted[name].norm() + 1e-7, name


@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_training_and_device_driven_decode_go_on_from_one_another(folder: Path, checkpointing: bool | None) -> None:
    stock, model = tiny_device.stock_of(folder), tiny_device.load(folder, 6, "lru", 4)
    text = tiny_device.greedy(stock, 3, IDS)
    assert tiny_device.greedy(model, 3, IDS) == text
    assert model.graphs.held  # the device drove
    for one in (stock, model):
        if checkpointing is not None:
            one.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            one.enable_input_require_grads()
        one.train()
    assert_close(model, stock)
    stock.eval()
    model.eval()
    assert tiny_device.greedy(model, 3, IDS) == text
    assert_close(model, stock)
    stats = model.hotset.stats()
    assert stats["backward"]["fetched"] > 0
    assert stats["hits"] + stats["misses"] == stats["asked"]
    model.hotset.close()


def test_a_step_whose_gradients_may_be_asked_for_is_not_replayed(folder: Path) -> None:
    model = tiny_device.load(folder, 6, "lru", 4)
    cache = static_cache(model.config, 32)
    with torch.no_grad():
        model(input_ids=IDS, past_key_values=cache)
        model(input_ids=IDS[:, :1], past_key_values=cache)
    assert len(model.graphs.held) == 1
    assert model.hotset.stats()["driven_by"] == "device"
    model.requires_grad_(False)
    assert model(input_ids=IDS[:, :1], past_key_values=cache).logits.grad_fn is None
    assert model.hotset.stats()["driven_by"] == "device"
    model.requires_grad_(True)
    assert model(input_ids=IDS[:, :1], past_key_values=cache).logits.grad_fn is not None
    assert model.hotset.stats()["driven_by"] == "host"
    assert [note for note in model.hotset.notes if "torch.no_grad()" in note]
    model.requires_grad_(False)  # what the cache holds depends on them still
    assert model(input_ids=IDS[:, :1], past_key_values=cache).logits.grad_fn is not None
    assert model.hotset.stats()["driven_by"] == "host"
    model.hotset.close()
