"""Models whose experts are in a format that exists in the tests only: found in a checkpoint, served packed, and exact.

The format is registered, and not a line outside its own file knows of it.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

import encoded_models  # noqa: E402
from rows8 import Rows8  # noqa: E402
from rows8 import encoded as encode_matrix  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import hotset  # noqa: E402
from hotset import formats, policies  # noqa: E402
from hotset.cache.controller import Controller  # noqa: E402
from hotset.cache.plan import Scope, SlotPlan  # noqa: E402
from hotset.engine.arena import poison  # noqa: E402
from hotset.engine.build import gpu_engine  # noqa: E402
from hotset.engine.kernels.grouped import GroupedKernels  # noqa: E402
from hotset.errors import HotsetError, ModelError  # noqa: E402
from hotset.models.budget import shape_of  # noqa: E402
from hotset.models.connect import connect_engine  # noqa: E402
from hotset.models.deferred import DeferredExperts, load_without_experts  # noqa: E402
from hotset.models.packing import pack  # noqa: E402

pytestmark = pytest.mark.usefixtures("_rows8")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
PROMPT = torch.tensor([[5, 90, 31, 7, 41, 77]])


@pytest.fixture(scope="module")
def _rows8() -> Iterator[None]:
    undo = formats.register(Rows8)
    yield
    undo()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
        initializer_range=0.2, eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("plain") / "model"
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoded(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoded_models.encode(plain, tmp_path_factory.mktemp("encoded") / "model")


@pytest.fixture(scope="module")
def decoded(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoded_models.decoded(plain, tmp_path_factory.mktemp("decoded") / "model")


@pytest.fixture(scope="module")
def expected(decoded: Path) -> Any:
    """What transformers makes of the decoded numbers."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32)(PROMPT).logits


def logits(model: Any) -> Any:
    device = next(model.parameters()).device
    with torch.no_grad():
        whole = model(PROMPT.to(device)).logits
        one = model(PROMPT[:, :1].to(device)).logits
    assert torch.allclose(one, whole[:, :1], atol=1e-4)
    return whole.cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory", ["50%", "100%"])
def test_a_checkpoint_runs_packed(encoded: Path, decoded: Path, expected: Any, device: str, memory: str) -> None:
    model = hotset.load(encoded, memory=memory, device=device, dtype=torch.float32)
    layout, turned = model.hotset.engine.offload.catalog.layers[0].layout, "" if device == "cpu" else ",turned=on"
    assert [matrix.format for matrix in layout.matrices] == [f"rows8:dtype=float32{turned}"] * 2
    found = logits(model)
    assert torch.allclose(found, expected, atol=1e-4)
    model.hotset.close()
    dense = hotset.load(decoded, memory=memory, device=device, dtype=torch.float32)
    if memory == "50%":  # else it is left as it is
        assert dense.hotset.engine.offload.catalog.slot_bytes > 2 * model.hotset.engine.offload.catalog.slot_bytes
        if device == "cpu":
            assert torch.equal(logits(dense), found)
    dense.hotset.close()


def test_a_checkpoint_that_says_how_it_is_quantised(encoded: Path, expected: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(encoded, tmp_path / "model"))
    encoded_models.edit_config(folder, quantization_config={"quant_method": "rows8-by-hand"})
    pack(folder, tmp_path / "pack", dtype="float32")
    for path in (folder, tmp_path / "pack"):
        model = hotset.load(path, memory="50%", device="cpu", dtype=torch.float32)
        assert torch.allclose(logits(model), expected, atol=1e-4)
        model.hotset.close()
    encoded_models.edit_config(folder, quantization_config={"quant_method": "rows9"})
    with pytest.raises(ModelError, match="quantised by rows9"):
        hotset.load(folder, memory="50%", device="cpu", dtype=torch.float32)


def test_other_weights_in_a_format_are_decoded(encoded: Path, tmp_path: Path) -> None:
    folder, name = Path(shutil.copytree(encoded, tmp_path / "model")), "model.layers.1.self_attn.q_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    values, scales = encode_matrix(tensors[name])
    save_file(
        tensors | {name: values, f"{name}_scale": scales}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    model = hotset.load(folder, memory="50%", device="cpu", dtype=torch.float32)
    numbers = torch.empty_like(tensors[name])
    Rows8("float32").decode((values, scales), numbers)
    assert torch.equal(model.get_parameter(name), numbers)
    model.hotset.close()


def test_bfloat16_rounds_once(encoded: Path, decoded: Path) -> None:
    packed = hotset.load(encoded, memory="50%", device="cpu", dtype=torch.bfloat16)
    dense = hotset.load(decoded, memory="50%", device="cpu", dtype=torch.bfloat16)
    assert torch.equal(logits(packed), logits(dense))
    packed.hotset.close()
    dense.hotset.close()


class FewAtOnce(GroupedKernels):
    """Says of few tokens what kernels in Triton say of them, and computes by torch."""

    def prefers_one_run(self, batch: Any) -> bool:
        return batch.tokens * batch.top_k <= 64


@pytest.mark.parametrize(("kernels", "kind"), [(GroupedKernels, "cpu"), (FewAtOnce, "cpu"), (FewAtOnce, "cuda")])
def test_the_host_drives_a_device(encoded: Path, expected: Any, kernels: Any, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    deferred = DeferredExperts(keep=lambda *_: False, device_kind=kind)  # a GPU's variant is made on arrival
    with load_without_experts(deferred):
        model = AutoModelForCausalLM.from_pretrained(encoded, dtype=torch.float32)
    assert deferred.moe_layers is not None
    assert deferred.catalog is not None
    assert (deferred.catalog.layers[0].decode is None) == (kind == "cpu")
    shape = shape_of(deferred.moe_layers, deferred.catalog)
    controller = Controller(SlotPlan(shape, 9, Scope.LAYER, 3), policies.parse("lru"))
    specs = [moe_layer.spec for moe_layer in deferred.moe_layers]

    def make(arena: Any, layout: Any, spec: Any, top_k: int) -> Any:
        return kernels(arena, layout, spec)

    host = SlotPlan(shape, 16, staging=8)
    engine = gpu_engine(
        controller, deferred.catalog, specs, torch.device("cpu"), host, policies.parse("lru"), kernels=make
    )
    assert engine.offload is not None
    assert engine.offload.tier is not None
    poison(engine.offload.arena)
    poison(engine.offload.tier.arena)
    connect_engine(model, deferred.moe_layers, engine)
    assert torch.allclose(logits(model), expected, atol=1e-4)
    model.hotset.close()


def test_a_pack_keeps_the_format(encoded: Path, expected: Any, tmp_path: Path) -> None:
    pack(encoded, tmp_path / "pack", dtype="float32")
    index = json.loads((tmp_path / "pack" / "experts.json").read_text())
    assert index["version"] == 2
    assert {matrix["format"] for layer in index["layers"] for matrix in layer["matrices"]} == {"rows8:dtype=float32"}
    model = hotset.load(tmp_path / "pack", memory="50%", device="cpu")
    assert torch.allclose(logits(model), expected, atol=1e-4)
    model.hotset.close()
    with pytest.raises(HotsetError, match=r"another model|packed for a model in"):
        hotset.load(tmp_path / "pack", memory="50%", device="cpu", dtype=torch.bfloat16)


def test_a_pack_in_a_format_that_is_not_known_is_refused_by_name(encoded: Path, tmp_path: Path) -> None:
    pack(encoded, tmp_path / "pack", dtype="float32")
    formats._registered.pop("rows8")
    try:
        with pytest.raises(HotsetError, match="no weight format is called 'rows8'"):
            hotset.load(tmp_path / "pack", memory="50%", device="cpu")
    finally:
        formats.register(Rows8)


def test_plain_checkpoints_make_the_same_pack_as_ever(plain: Path, tmp_path: Path) -> None:
    pack(plain, tmp_path / "pack")
    index = json.loads((tmp_path / "pack" / "experts.json").read_text())
    assert index["version"] == 1
    assert all("matrices" not in layer for layer in index["layers"])


NAME = "model.layers.1.mlp.experts.2.up_proj.weight"
DAMAGES = {
    "scales of another length": {f"{NAME}_scale": torch.ones(31)},
    "scales of another type": {f"{NAME}_scale": torch.ones(32, dtype=torch.float64)},
    "values of another shape": {NAME: torch.ones(32, 48, dtype=torch.int8)},
    "more outputs": {NAME: torch.ones(40, 64, dtype=torch.int8), f"{NAME}_scale": torch.ones(40)},
    "one expert in plain numbers": {NAME: torch.ones(32, 64), f"{NAME}_scale": None},
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_tensors_that_do_not_fit_are_named(encoded: Path, tmp_path: Path, damage: dict[str, Any]) -> None:
    folder = Path(shutil.copytree(encoded, tmp_path / "damaged"))
    tensors = load_file(folder / "model.safetensors") | damage
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj\.weight") as caught:
        hotset.load(folder, memory="50%", device="cpu", dtype=torch.float32)
    assert "\n" not in str(caught.value)
