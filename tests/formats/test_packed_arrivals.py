"""Packed experts on a CPU: the same bits whatever prefetch brings, and in whatever order experts arrive."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

import encoded_models  # noqa: E402
import exactness  # noqa: E402
from fake_mover import FakeMover  # noqa: E402
from published import PUBLISHED  # noqa: E402

import hotset  # noqa: E402
from hotset.engine import build  # noqa: E402
from hotset.models.packing import pack  # noqa: E402
from hotset.transfer.reads import Load, ReadTransfer  # noqa: E402

OWN, BLOCKS = ("int4", "int8"), "Q4_0"
FORMATS = [
    "fp8, DeepSeek-V3", "mxfp4, compressed-tensors", "nvfp4, modelopt", "int4, asymmetric",
    "gptq, version 2, any order", "awq", *(f"own {kind}" for kind in OWN), f"GGUF {BLOCKS}",
]  # fmt: skip
MODES = ["off", "gate", "best", "previous", "auto"]
PROMPT, NEW_TOKENS = torch.tensor([[5, 90, 31, 7, 41, 77]]), 24


class Arriving(dict[int, tuple[int, int]]):
    """Rows of memory: an expert that is put into one is read into it."""

    def __init__(self, readers: Any) -> None:
        self.readers, self.order = readers, []  # type: ignore[var-annotated]

    def __setitem__(self, row: int, key: tuple[int, int]) -> None:
        transfer = ReadTransfer()
        self.readers.start(transfer, [Load(*key, row)])
        transfer.wait_any()
        self.order.append(key)
        super().__setitem__(row, key)


class AnyOrder(FakeMover):
    """Experts of an event, some at a time, in any order."""

    made: list[AnyOrder] = []  # noqa: RUF012 - of all engines, for the test to look at
    at, seed = 1, 0

    def __init__(self, readers: Any, staging: Any) -> None:
        super().__init__(Arriving(readers), staging, at_once=self.at, seed=self.seed)
        self.made.append(self)

    def waited_s(self) -> float:
        return 0.0

    def close(self) -> None:
        self.memory.readers.close()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models whose layers have ten experts of which a token uses three."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_experts=10, num_experts_per_tok=3, moe_intermediate_size=32,
        initializer_range=0.2, eos_token_id=None,
    )  # fmt: skip
    folder, found = tmp_path_factory.mktemp("models"), {}
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "plain")
    for number, name in enumerate(FORMATS):
        found[name] = made(name, folder / "plain", folder / str(number))
    return found


def made(name: str, plain: Path, target: Path) -> Path:
    """The model with its experts in a format: a published checkpoint, a pack of hotset, or a GGUF file."""
    if name.startswith("own "):
        pack(plain, target, dtype="bfloat16", experts=name.removeprefix("own "))
        return target
    if name.startswith("GGUF "):
        gguf_models = pytest.importorskip("gguf_models")
        tensors, keys = gguf_models.tensors_of(plain), gguf_models.keys_of(plain, "qwen3moe")
        file: Path = gguf_models.write(target.with_suffix(".gguf"), tensors, keys, gguf_models.matrices_as(BLOCKS))
        return file
    encoded_models.rewrite(plain, target, PUBLISHED[name].named)
    encoded_models.edit_config(target, quantization_config=PUBLISHED[name].config)
    return target


def logits(folder: Path, prefetch: str = "off") -> tuple[Any, dict[str, Any]]:
    """Of a prompt and of a text token by token; and what the engine counted."""
    model = exactness.aligned(hotset.load(folder, memory="50%", device="cpu", dtype=torch.bfloat16, prefetch=prefetch))
    assert all(layer.layout.matrices for layer in model.hotset.engine.offload.catalog.layers)  # it stays packed
    text = torch.randint(128, (NEW_TOKENS,), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        out = model(PROMPT, use_cache=True)
        found = [out.logits[0]]
        for token in text:
            out = model(token.view(1, 1), past_key_values=out.past_key_values, use_cache=True)
            found.append(out.logits[0])
    stats = model.hotset.stats()
    model.hotset.close()
    return torch.cat(found), stats


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, Any]:
    return {name: logits(folder)[0] for name, folder in folders.items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FORMATS)
def test_prefetch_changes_no_bit(name: str, mode: str, folders: dict[str, Path], expected: dict[str, Any]) -> None:
    found, stats = logits(folders[name], mode)
    assert torch.equal(found, expected[name])
    decode = stats["decode"]
    assert decode["misses"] > 0
    assert (decode["prefetch_hits"] + decode["late"] > 0) == (mode != "off"), decode


@pytest.mark.parametrize(("at_once", "seed"), [(1, 0), (1, 1), (2, 2), (99, 4)])
@pytest.mark.parametrize("name", FORMATS)
def test_the_order_of_arrival_changes_no_bit(
    name: str,
    at_once: int,
    seed: int,
    folders: dict[str, Path],
    expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AnyOrder, "made", [])
    monkeypatch.setattr(AnyOrder, "at", at_once)
    monkeypatch.setattr(AnyOrder, "seed", seed)
    monkeypatch.setattr(build, "DiskMover", AnyOrder)
    assert torch.equal(logits(folders[name])[0], expected[name])
    (mover,) = AnyOrder.made
    asked = [(fetch.layer, expert) for fetch in mover.fetches for expert in fetch.experts]
    order = mover.memory.order  # type: ignore[attr-defined]
    assert sorted(order) == sorted(asked)
    assert order != asked
