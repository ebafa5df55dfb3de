"""Attaching to a model in memory, and giving it back bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402

import hotset  # noqa: E402
from hotset.engine.arena import poison  # noqa: E402
from hotset.errors import BudgetError, ModelError  # noqa: E402


def snapshot(model: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "dbrx", "switch_transformers", "longcat_flash", "jetmoe"])
def test_detach_leaves_the_model_as_it_was(name: str, tmp_path: Path) -> None:
    model = tiny.make(name)
    before, ids = snapshot(model), {key: id(parameter) for key, parameter in model.named_parameters()}
    attributes = set(model.__dict__)
    given = tiny.inputs(name, model)
    expected = tiny.logits(model, given)
    hotset.attach(model, memory="50%", spill=tmp_path)
    poison(model.hotset.engine.offload.arena)
    assert sum(p.numel() for p in model.parameters()) < sum(t.numel() for t in before.values())
    assert torch.allclose(tiny.logits(model, given), expected, atol=1e-5)
    assert model.hotset.stats()["misses"] > 0
    hotset.detach(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert {key: id(parameter) for key, parameter in model.named_parameters()} == ids
    assert set(model.__dict__) == attributes
    assert torch.equal(tiny.logits(model, given), expected)
    assert list(tmp_path.iterdir()) == []


def test_a_lean_model_can_be_made_whole(tmp_path: Path) -> None:
    tiny.save("mixtral", tmp_path)
    stock = tiny.load("mixtral", tmp_path)
    with tiny.quiet():
        model = hotset.load(str(tmp_path), memory="50%", dtype=torch.float32)
    with pytest.raises(ModelError, match="detach"):
        model.save_pretrained(tmp_path / "copy")
    hotset.detach(model)
    expected, found = stock.state_dict(), model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    with tiny.quiet():
        model.save_pretrained(tmp_path / "copy")


def test_attach_refuses_what_it_cannot_do() -> None:
    model = tiny.make("mixtral")
    with pytest.raises(BudgetError, match="smallest budget that works"):
        hotset.attach(model, memory="1KiB")
    with pytest.raises(ModelError, match="not attached"):
        hotset.detach(model)
    hotset.attach(model, memory="50%")
    with pytest.raises(ModelError, match="attached to this model already"):
        hotset.attach(model, memory="50%")
    hotset.detach(model)


def test_a_model_that_fits_is_left_alone_and_can_still_be_recorded() -> None:
    model = tiny.make("mixtral")
    given = tiny.inputs("mixtral", model)
    expected = tiny.logits(model, given)
    hotset.attach(model, memory="100%")
    assert model.hotset.stats()["engine"] == "stock"
    assert "fit" in model.hotset.notes[0]
    with model.hotset.trace() as recorder:
        assert torch.equal(tiny.logits(model, given), expected)
    trace = recorder.finish()
    assert trace.tokens == given["input_ids"].numel()
    assert trace.requests == len(given["input_ids"])
    assert model.hotset.stats()["hits"] == model.hotset.stats()["asked"] > 0
    hotset.detach(model)
    assert torch.equal(tiny.logits(model, given), expected)
