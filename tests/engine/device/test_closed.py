"""A model that the device drives refuses every call once it is closed, though its forward was restored before."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

import tiny_device as tiny  # noqa: E402

from hotset.errors import ClosedError  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(tiny.LATE, reason="Triton was imported before its interpreter was asked for"),
]


def test_a_model_driven_by_the_device_refuses_once_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.go_without_graphs(monkeypatch)
    model = tiny.load(tiny.make(tmp_path, layers=2, experts=4, top_k=2), 4, "lru", 4)
    ids = torch.tensor([[5, 6, 7]], device=tiny.DEVICE)
    tiny.greedy(model, 3, ids)
    assert model.graphs.held  # the device drove
    model.hotset.close()
    for call in (model, model.forward, model.generate, model.model, model.save_pretrained):
        with pytest.raises(ClosedError):
            call(ids)
    assert not model.graphs.held
    model.hotset.close()
