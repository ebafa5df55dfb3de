"""What hotset changes in transformers, torch and a model is undone: in the libraries by `close`, all by `detach`."""

from __future__ import annotations

import sys
import warnings
from logging import getLogger
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402

import hotset  # noqa: E402
from hotset.errors import ClosedError  # noqa: E402
from hotset.models import patches  # noqa: E402

FAMILIES = ["qwen3_moe", "gpt_oss", "llama4", "switch_transformers", "dbrx", "nllb_moe"]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def library() -> dict[str, Any]:
    """All that hotset touches in transformers and torch, as it is now."""
    from transformers import PreTrainedModel
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config: Any = torch._dynamo.config
    return {
        "loader": vars(PreTrainedModel)["_load_pretrained_model"],
        "experts": dict(ALL_EXPERTS_FUNCTIONS.items()),
        "attention": dict(ALL_ATTENTION_FUNCTIONS.items()),
        "look-up": vars(ALL_ATTENTION_FUNCTIONS).get("get_interface"),
        "shapes": config.recompile_limit,
    }


def attributes(model: Any) -> dict[str, dict[str, Any]]:
    """What every module of a model has of its own: attributes, parameters and hooks by name, with their values."""
    return {
        name: {
            key: dict(value) if key in ("_parameters", "_buffers", "_modules") or key.endswith("_hooks") else value
            for key, value in vars(module).items()
        }
        for name, module in model.named_modules()
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[key]) for key, value in one.items())
    return one is other or (not isinstance(one, torch.Tensor) and bool(one == other))


def home_of(model: Any) -> Any:
    return sys.modules[type(model).__module__]


@pytest.mark.parametrize("memory", ["50%", "100%"])
@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_detach_the_model_and_the_libraries_are_as_they_were(family: str, memory: str, tmp_path: Path) -> None:
    model = tiny.make(family)
    given = tiny.inputs(family, model)
    expected = tiny.logits(model, given)
    before, libraries, config = attributes(model), library(), model.config.to_dict()
    weights = {name: (each, each.clone()) for name, each in model.named_parameters()}
    hotset.attach(model, memory=memory, spill=tmp_path)
    model.hotset.observe()
    tiny.logits(model, given)
    assert not same(attributes(model), before)
    hotset.detach(model)
    assert same(attributes(model), before)
    assert same(library(), libraries)
    assert model.config.to_dict() == config
    for name, each in model.named_parameters():  # the same objects, in the same order, with the same values
        assert each is weights[name][0]
        assert torch.equal(each, weights[name][1])
    assert torch.equal(tiny.logits(model, given), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_after_close_the_libraries_are_as_they_were_and_the_model_only_refuses(family: str, tmp_path: Path) -> None:
    tiny.save(family, tmp_path)
    libraries = library()
    with tiny.quiet():
        model = hotset.load(str(tmp_path), memory="50%", dtype=torch.float32, auto_class=tiny.auto_class(family))
    assert same(library(), libraries)  # what a load replaces lasts no longer than it
    tiny.logits(model, tiny.inputs(family, model))
    model.hotset.close()
    assert same(library(), libraries)
    with pytest.raises(ClosedError):
        model(**tiny.inputs(family, model))
    model.hotset.patches.lift()
    ours = {"_hotset_shapes", "_hotset_dtypes"}  # which parameters are missing
    assert {name for name in vars(model) if "hotset" in name} == ours
    assert not any("forward" in vars(module) for module in model.modules())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_what_a_capture_replaces_lasts_no_longer_than_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    model = tiny.make("qwen3_moe")
    before, libraries, rotate = attributes(model), library(), home_of(model).apply_rotary_pos_emb
    with patches.small_parts_fused(model, CPU):
        assert same(attributes(model), before)  # nothing is launched there
    with pytest.raises(KeyboardInterrupt), patches.small_parts_fused(model, CUDA):  # noqa: PT012
        assert not same(attributes(model), before)
        assert not same(library(), libraries)
        assert home_of(model).apply_rotary_pos_emb is not rotate
        raise KeyboardInterrupt
    assert compiled
    assert same(attributes(model), before)
    assert same(library(), libraries)
    assert home_of(model).apply_rotary_pos_emb is rotate


def test_the_rotation_of_a_capture_is_that_of_its_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    import threading

    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda: ("compiled", function))
    model, found = tiny.make("qwen3_moe"), []
    monkeypatch.setattr(home_of(model), "apply_rotary_pos_emb", lambda: "plain")
    with patches.small_parts_fused(model, CUDA):
        assert home_of(model).apply_rotary_pos_emb()[0] == "compiled"
        thread = threading.Thread(target=lambda: found.append(home_of(model).apply_rotary_pos_emb()))
        thread.start()
        thread.join()
    assert found == ["plain"]


def loudness() -> tuple[Any, ...]:
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    return (*bars, logging.get_verbosity(), hub_logging.get_verbosity(), getLogger("hotset").level, warnings.filters[:])


@pytest.mark.parametrize("progress", [True, False])
def test_libraries_are_quiet_for_the_length_of_a_command(progress: bool) -> None:
    before = loudness()
    with pytest.raises(KeyboardInterrupt), patches.libraries_quiet(progress=progress):  # noqa: PT012
        assert loudness()[2:] != before[2:]
        assert loudness()[0] is (progress and before[0])
        raise KeyboardInterrupt
    assert loudness() == before


def test_all_are_undone_newest_first_whatever_one_of_them_raises() -> None:
    stack, done = patches.Patches(), []

    def fails() -> None:
        done.append("fails")
        raise ValueError("not yet")

    stack.add(lambda: done.append("first"))
    stack.add(lambda: done.append("lasting"), until_whole=True)
    stack.add(fails)
    stack.add(lambda: done.append("last"))
    with pytest.raises(ValueError, match="not yet"):
        stack.close()
    assert done == ["last", "fails", "first"]
    with pytest.raises(ValueError, match="not yet"):
        stack.lift()
    assert done[3:] == ["fails", "lasting"]
