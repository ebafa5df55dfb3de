"""Formats of few bits in the kernels of both drivers: whole experts, and many tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton")
import encoded_models  # noqa: E402
import expert_samples as samples  # noqa: E402
import tiny_device  # noqa: E402
from packed_samples import SPECS, both, round_as_devices_do  # noqa: E402
from published import PUBLISHED  # noqa: E402
from tiny_device import DEVICE  # noqa: E402

from hotset.engine.batch import ExpertBatch  # noqa: E402
from hotset.engine.kernels import grouped, with_triton  # noqa: E402
from hotset.engine.kernels.decoding import MatrixDecoder  # noqa: E402
from hotset.engine.kernels.grouped import GroupedKernels  # noqa: E402
from hotset.engine.kernels.triton_experts import TritonExperts  # noqa: E402

pytestmark = [
    pytest.mark.skipif(tiny_device.LATE, reason="the interpreter came too late"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def _no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_device.go_without_graphs(monkeypatch)


@pytest.fixture(autouse=True)
def _rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    round_as_devices_do(monkeypatch)


@pytest.mark.parametrize(
    ("family", "spec"),
    [*(("qwen3_moe", spec) for spec in SPECS), ("gpt_oss", "mxfp4"), ("gpt_oss", "fp8:block_n=16,block_k=32")],
)
def test_experts_are_computed_from_parts(family: str, spec: str) -> None:
    dense, packed = both(family, spec)
    routing = samples.routing_of(packed, tokens=2, top_k=3)
    kernels, out = TritonExperts(packed.arena, packed.layout, packed.spec, top_k=3), torch.empty_like(routing.x)
    kernels(routing.x, routing.rows(packed), None, routing.weights, out)
    expected = samples.expected(dense, routing)
    assert expected.abs().max() > 1e-3
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("spec", ["fp8:block_n=16,block_k=32", "mxfp4", "integer"])
def test_the_host_s_kernels_compute_in_parts_what_they_compute_at_once(spec: str) -> None:
    dense, packed = both("qwen3_moe", spec)
    routing = samples.routing_of(packed, tokens=2, top_k=3)
    expected = samples.expected(dense, routing)
    many = GroupedKernels(packed.arena, packed.layout, packed.spec)
    for kernels in (many, with_triton(packed.arena, packed.layout, packed.spec, 3, many)):
        found = []
        for cut in (2, 3):
            batch = ExpertBatch(routing.x, routing.index.to(routing.x.device), routing.weights, packed.experts)
            for part in (batch.experts[:cut], batch.experts[cut:]):
                kernels.run(batch, part, packed.slot(part))
            found.append(batch.combine())
        assert torch.equal(*found)
        assert (found[0] - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("experts_at_once", [1, 2, 100])
def test_many_tokens_are_multiplied_by_what_was_written_out(
    experts_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, packed = both("gpt_oss", "mxfp4")
    routing = samples.routing_of(packed, tokens=4, top_k=3)
    kernels = GroupedKernels(packed.arena, packed.layout, packed.spec)
    for linear in (kernels.experts.up, kernels.experts.down):
        linear._decoder = MatrixDecoder.of(linear)
        assert linear._decoder is not None
    size = kernels.experts.up.width * kernels.experts.up.depth * 4
    monkeypatch.setattr(grouped, "DECODED_BYTES", experts_at_once * size)
    expected, found = samples.expected(dense, routing), []
    for cut in (1, 3, 8):
        batch = ExpertBatch(routing.x, routing.index.to(routing.x.device), routing.weights, packed.experts)
        for part in (batch.experts[:cut], batch.experts[cut:]):
            if len(part):
                kernels.run(batch, part, packed.slot(part))
        found.append(batch.combine())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert (found[0] - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_without_a_kernel_one_matrix_comes_after_another() -> None:
    dense, packed = both("qwen3_moe", "mxfp4")
    routing = samples.routing_of(packed, tokens=4, top_k=3)
    kernels = GroupedKernels(packed.arena, packed.layout, packed.spec)
    for linear in (kernels.experts.up, kernels.experts.down):
        linear._decoder = lambda _: None
    batch = ExpertBatch(routing.x, routing.index.to(routing.x.device), routing.weights, packed.experts)
    kernels.run(batch, batch.experts, packed.slot(batch.experts))
    expected = samples.expected(dense, routing)
    assert kernels.experts.up._decoder is None
    assert (batch.combine() - expected).abs().max() <= 1e-5 * expected.abs().max()


DRIVEN = ["fp8, DeepSeek-V3", "mxfp4, compressed-tensors", "nvfp4, modelopt", "int4, asymmetric", "gptq"]


@pytest.mark.parametrize("name", DRIVEN)
def test_a_model_is_driven_by_the_device(name: str, tmp_path: Path) -> None:
    kind = PUBLISHED[name]
    source = tiny_device.make(tmp_path / "plain", 2, 8, 3, width=32, inner=32)
    encoded = encoded_models.rewrite(source, tmp_path / "encoded", kind.named)
    encoded_models.edit_config(encoded, quantization_config=kind.config)
    decoded = encoded_models.rewrite(source, tmp_path / "decoded", lambda key, matrix: {key: kind.back(matrix)})
    stock = tiny_device.stock_of(decoded)
    model: Any = tiny_device.load(encoded, 8, "lru", 3, demanded=True)
    assert len(model.hotset.engine.offload.catalog.layers[0].layout.matrices) == 2
    ids = torch.tensor([[5, 90, 31, 7]], device=DEVICE)
    new = 16 if CUDA else 3
    assert tiny_device.greedy(model, new, ids) == tiny_device.greedy(stock, new, ids)
    assert model.hotset.stats()["driven_by"] == "device"
    model.hotset.close()
