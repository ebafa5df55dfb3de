"""The kernels of both drivers compute from parts of any format: one that exists in the tests only, here."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
from rows8 import Rows8, encoded  # noqa: E402
from tiny_device import DEVICE  # noqa: E402

from hotset import formats  # noqa: E402
from hotset.engine.arena import Arena, poison  # noqa: E402
from hotset.engine.batch import ExpertBatch  # noqa: E402
from hotset.engine.kernels import with_triton  # noqa: E402
from hotset.engine.kernels.grouped import GroupedKernels  # noqa: E402
from hotset.engine.kernels.triton_experts import TritonExperts  # noqa: E402
from hotset.store import Part, SlotLayout  # noqa: E402
from hotset.store.layout import PAGE_BYTES, round_up  # noqa: E402

pytestmark = [
    pytest.mark.skipif(tiny_device.LATE, reason="the interpreter came too late"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("_rows8"),
]
LAYERS, EXPERTS, TOP_K = 2, 8, 3


@pytest.fixture(scope="module")
def _rows8() -> Iterator[None]:
    undo = formats.register(Rows8)
    yield
    undo()


@pytest.fixture(autouse=True)
def _no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_device.go_without_graphs(monkeypatch)


def in_rows8(sample: samples.Sample, kind: str = "cpu") -> samples.Sample:
    """The same experts with their two matrices in the tests' format, the rest as it is."""
    spec, layout = sample.spec, sample.layout
    dtype = str(sample.dtype).removeprefix("torch.")
    parts: list[Part] = []
    matrices = []
    for part in layout.parts:
        if part.name not in (spec.up, spec.down):
            parts.append(part)
            continue
        weight = formats.weight_of(layout, part.name, transposed=spec.is_transposed(part.name))
        own, matrix = formats.laid_out(part.name, Rows8(dtype).on(kind, ()), weight.outputs, weight.inputs)
        parts += own
        matrices.append(matrix)
    encoded_layout = SlotLayout.of(parts, [matrix for matrix in matrices if matrix is not None])
    arena = Arena.on_device(2 * sample.experts, round_up(encoded_layout.used_bytes, PAGE_BYTES), samples.DEVICE)
    poison(arena)
    for part in layout.parts:
        values = sample.arena.view(part)[::2]
        if part.name in (spec.up, spec.down):
            matrix = values.transpose(-2, -1) if spec.is_transposed(part.name) else values
            codes, scales = encoded(matrix)
            held = codes if kind == "cpu" else codes.transpose(-2, -1)
            for name, data in ((f"{part.name}:values", held), (f"{part.name}:scales", scales)):
                arena.view(encoded_layout.part(name))[::2] = data
            numbers = torch.empty_like(matrix)  # so that the dense sample holds what the codes stand for
            Rows8(dtype).decode((codes, scales), numbers)
            values.copy_(numbers.transpose(-2, -1) if spec.is_transposed(part.name) else numbers)
        else:
            arena.view(encoded_layout.part(part.name))[::2] = values
    return samples.Sample(arena, encoded_layout, spec, sample.experts, sample.width, sample.dtype)


@pytest.mark.parametrize(
    ("family", "kind"), [("qwen3_moe", "cpu"), ("qwen3_moe", "cuda"), ("gpt_oss", "cpu"), ("nemotron_h", "cuda")]
)
def test_the_kernels_of_the_device_compute_from_parts(family: str, kind: str) -> None:
    dense = samples.sample_of(*samples.spec_of(family), torch.float32)
    packed = in_rows8(dense, kind)
    assert packed.arena.slot_bytes <= dense.arena.slot_bytes
    routing = samples.routing_of(packed, tokens=2, top_k=3)
    kernels, out = TritonExperts(packed.arena, packed.layout, packed.spec, top_k=3), torch.empty_like(routing.x)
    kernels(routing.x, routing.rows(packed), None, routing.weights, out)
    expected = samples.expected(dense, routing)
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_the_kernels_of_the_host_compute_from_parts() -> None:
    dense = samples.sample_of(*samples.spec_of("qwen3_moe"), torch.float32)
    packed = in_rows8(dense)
    routing = samples.routing_of(packed, tokens=2, top_k=3)
    many = GroupedKernels(packed.arena, packed.layout, packed.spec)
    for kernels in (many, with_triton(packed.arena, packed.layout, packed.spec, 3, many)):
        batch = ExpertBatch(routing.x, routing.index.to(routing.x.device), routing.weights, packed.experts)
        for part in (batch.experts[:2], batch.experts[2:]):
            kernels.run(batch, part, packed.slot(part))
        expected = samples.expected(dense, routing)
        assert (batch.combine() - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.skipif(not CUDA, reason="the interpreter rounds to bfloat16 otherwise")
def test_tiles_are_rounded_as_decoded_matrices_are() -> None:
    dense = samples.sample_of(*samples.spec_of("qwen3_moe"), torch.bfloat16)
    packed = in_rows8(dense)
    routing = samples.routing_of(packed, tokens=1, top_k=3)
    results = []
    for sample in (dense, packed):
        kernels, out = TritonExperts(sample.arena, sample.layout, sample.spec, top_k=3), torch.empty_like(routing.x)
        kernels(routing.x, routing.rows(sample), None, routing.weights, out)
        results.append(out.float())
    assert (results[0] - results[1]).abs().max() <= 2.0**-6 * results[0].abs().max()


def test_a_format_without_a_tile_loader_is_computed_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rows8, "tile", lambda _: None)
    packed = in_rows8(samples.sample_of(*samples.spec_of("qwen3_moe"), torch.float32))
    reason = TritonExperts.supports(packed.spec, packed.layout)
    assert reason is not None
    assert "rows8" in reason
    many = GroupedKernels(packed.arena, packed.layout, packed.spec)
    assert with_triton(packed.arena, packed.layout, packed.spec, 3, many) is many


def test_a_model_in_the_format_is_driven_by_the_device(tmp_path: Path) -> None:
    source = tiny_device.make(tmp_path / "plain", LAYERS, EXPERTS, TOP_K)
    stock = tiny_device.stock_of(encoded_models.decoded(source, tmp_path / "decoded"))
    model: Any = tiny_device.load(encoded_models.encode(source, tmp_path / "encoded"), 8, "lru", TOP_K, demanded=True)
    assert len(model.hotset.engine.offload.catalog.layers[0].layout.matrices) == 2
    ids = torch.tensor([[5, 90, 31, 7]], device=DEVICE)
    new = 16 if CUDA else 3
    assert tiny_device.greedy(model, new, ids) == tiny_device.greedy(stock, new, ids)
    assert model.hotset.stats()["driven_by"] == "device"
    model.hotset.close()
