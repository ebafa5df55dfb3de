"""A closed model refuses to run, to be saved and to be detached; copies are refused; what is temporary goes."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402

import hotset  # noqa: E402
from hotset.errors import ClosedError, ModelError  # noqa: E402

FAMILIES = ["qwen3_moe", "gpt_oss", "llama4", "switch_transformers"]


def loaded(name: str, folder: Path, dtype: Any = torch.float32, memory: str = "50%") -> Any:
    tiny.save(name, folder)
    with tiny.quiet():
        return hotset.load(str(folder), memory=memory, dtype=dtype, auto_class=tiny.auto_class(name))


def attached(name: str, folder: Path, dtype: Any = torch.float32, memory: str = "50%") -> Any:
    return hotset.attach(tiny.make(name).to(dtype), memory=memory, spill=folder)


def refuses(call: Callable[[], Any]) -> None:
    with pytest.raises(ClosedError, match="is closed and its experts are gone: load it again") as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("make", [loaded, attached])
def test_a_closed_model_refuses_every_call(make: Any, name: str, dtype: Any, tmp_path: Path) -> None:
    model = make(name, tmp_path / "model" if make is loaded else tmp_path, dtype)
    given = tiny.inputs(name, model)
    tiny.logits(model, given)
    layer = model.hotset.moe_layers[0].module
    model.hotset.close()
    refuses(lambda: model(**given))
    refuses(lambda: model.forward(**given))
    refuses(lambda: model.generate(given["input_ids"], max_new_tokens=2))
    refuses(lambda: model.save_pretrained(tmp_path / "copy"))
    refuses(lambda: hotset.detach(model))
    refuses(lambda: model.hotset.pin([(0, 0)]))
    refuses(lambda: model.hotset.trace())
    with (
        torch.no_grad(),
        pytest.raises(ClosedError),
    ):  # the layers by themselves
        model.base_model(**given)
    if name == "llama4":
        refuses(lambda: layer(torch.zeros(1, 1, layer.hidden_dim, dtype=dtype)))
    assert not (tmp_path / "copy").exists()
    assert model.hotset.stats()["misses"] > 0
    model.hotset.close()


def test_the_handle_closes_at_the_end_of_a_block(tmp_path: Path) -> None:
    model = loaded("qwen3_moe", tmp_path)
    given = tiny.inputs("qwen3_moe", model)
    with model.hotset as handle:
        tiny.logits(model, given)
    assert handle is model.hotset
    refuses(lambda: model(**given))


def test_closing_gives_the_memory_of_the_slots_back_while_the_model_lives(tmp_path: Path) -> None:
    model = loaded("qwen3_moe", tmp_path)
    tiny.logits(model, tiny.inputs("qwen3_moe", model))
    memory = model.hotset.engine.offload.arena.memory
    assert memory.any()
    model.hotset.close()
    assert not memory.any()  # pages that were given back read as zeros


def test_a_closed_model_whose_experts_fit_goes_on_as_stock(tmp_path: Path) -> None:
    model = loaded("qwen3_moe", tmp_path / "model", memory="100%")
    given = tiny.inputs("qwen3_moe", model)
    expected = tiny.logits(model, given)
    model.hotset.observe()
    model.hotset.close()
    assert torch.equal(tiny.logits(model, given), expected)
    with tiny.quiet():
        model.save_pretrained(tmp_path / "copy")
    hotset.detach(model)
    assert torch.equal(tiny.logits(model, given), expected)


def test_a_pass_under_way_when_another_thread_closes_is_refused(tmp_path: Path) -> None:
    model = loaded("qwen3_moe", tmp_path)
    given = tiny.inputs("qwen3_moe", model)
    first, found = model.hotset.moe_layers[0].module, []
    inside, closed = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        closed.wait()

    first.register_forward_pre_hook(wait)

    def run() -> None:
        try:
            tiny.logits(model, given)
        except ClosedError as error:
            found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    inside.wait()
    model.hotset.close()
    closed.set()
    thread.join()
    assert len(found) == 1


@pytest.mark.parametrize("memory", ["50%", "100%"])
def test_copies_are_refused_in_a_sentence_and_work_after_a_detach(memory: str, tmp_path: Path) -> None:
    model = loaded("qwen3_moe", tmp_path, memory=memory)
    for copying in (copy.deepcopy, copy.copy, pickle.dumps, lambda m: torch.save(m, tmp_path / "model.pt")):
        with pytest.raises(ModelError, match=r"cannot be copied or pickled: .*hotset\.detach"):
            copying(model)
    hotset.detach(model)
    given = tiny.inputs("qwen3_moe", model)
    assert torch.equal(tiny.logits(copy.deepcopy(model), given), tiny.logits(model, given))


@pytest.mark.parametrize("memory", ["50%", "100%"])
def test_loading_info_comes_with_the_model(memory: str, tmp_path: Path) -> None:
    tiny.save("qwen3_moe", tmp_path)
    with tiny.quiet():
        model, info = hotset.load(str(tmp_path), memory=memory, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    tiny.logits(model, tiny.inputs("qwen3_moe", model))
    model.hotset.close()


def test_the_library_reports_unexpected_weights_as_before_a_load(tmp_path: Path) -> None:
    tiny.save("qwen3_moe", tmp_path)
    with tiny.quiet():
        stock = tiny.load("qwen3_moe", tmp_path)
        with hotset.load(str(tmp_path), memory="50%", dtype=torch.float32).hotset as handle:
            ignored = handle._model()._keys_to_ignore_on_load_unexpected
    assert ignored == stock._keys_to_ignore_on_load_unexpected


@pytest.mark.parametrize("memory", ["50%", "100%"])
def test_fresh_statistics_are_plain_json(memory: str, tmp_path: Path) -> None:
    with loaded("qwen3_moe", tmp_path, memory=memory).hotset as handle:
        stats = handle.stats()
        json.dumps(stats, allow_nan=False)
        assert stats["hit_rate"] == stats["decode"]["hit_rate"] == (None if memory == "50%" else 1.0)


EXIT = """
import gc, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import tiny_models as tiny, hotset
spill = Path(sys.argv[2])
model = hotset.attach(tiny.make("qwen3_moe"), memory="50%", spill=spill)
tiny.logits(model, tiny.inputs("qwen3_moe", model))
assert len(list(spill.iterdir())) == 1
del model
gc.collect()
assert list(spill.iterdir()) == []
model = hotset.attach(tiny.make("qwen3_moe"), memory="50%", spill=spill)
assert len(list(spill.iterdir())) == 1
raise SystemExit(3)
"""


def test_the_spill_folder_goes_with_the_model_and_with_the_process(tmp_path: Path) -> None:
    families = Path(__file__).parent.parent / "families"
    done = subprocess.run(
        [sys.executable, "-c", EXIT, str(families), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    assert list(tmp_path.iterdir()) == []
