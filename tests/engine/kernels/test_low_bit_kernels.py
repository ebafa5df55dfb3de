"""Formats of few bits in the kernels of both drivers: tiles to the bits of their decoders, and whole experts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
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
import triton.language as tl  # noqa: E402
from packed_samples import encoded_sample, random_parts  # noqa: E402
from published import PUBLISHED  # noqa: E402
from tiny_device import DEVICE  # noqa: E402

from hotset import formats  # noqa: E402
from hotset.engine.batch import ExpertBatch  # noqa: E402
from hotset.engine.kernels import grouped, with_triton  # noqa: E402
from hotset.engine.kernels.decoding import MatrixDecoder  # noqa: E402
from hotset.engine.kernels.grouped import GroupedKernels  # noqa: E402
from hotset.engine.kernels.triton_experts import TritonExperts  # noqa: E402
from hotset.formats.gguf import KEPT  # noqa: E402
from hotset.store.gguf import BLOCKS  # noqa: E402

pytestmark = [
    pytest.mark.skipif(tiny_device.LATE, reason="the interpreter came too late"),
    pytest.mark.filterwarnings("ignore"),
]
SPECS = [
    "fp8:block_n=16,block_k=32", "fp8:block_n=24,block_k=24,scales=bfloat16", "fp8:block_n=0,block_k=0",
    "fp8:block_n=1,block_k=32,scales=e8m0", "fp8:block_n=16,block_k=32,values=e5m2",
    "mxfp4", "nvfp4:matrices=2", "nvfp4:matrices=2,divides=on",
    "integer", "integer:bits=8,scales=float16", "integer:bits=8,group=0,scales=float32",
    "integer:group=16,zeros=bytes,scales=float16", "integer:group=16,ordered=2",
    "integer:bits=8,group=16,zeros=bytes,ordered=2",
    *(f"gguf:kind={kind}" for kind in KEPT),
]  # fmt: skip
OF_256 = [kind for kind in KEPT if BLOCKS[kind].weights == 256]
DTYPES = ["float32", "bfloat16", "float16"]


@pytest.fixture(autouse=True)
def _no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_device.go_without_graphs(monkeypatch)


@pytest.fixture(autouse=True)
def _rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter round to bfloat16 as devices do: it cuts off, and widens subnormal numbers to others."""
    if CUDA:
        return
    from triton.runtime import interpreter

    cast = interpreter.InterpreterBuilder.cast_impl

    def rounded(self: Any, source: Any, target: Any) -> Any:
        if (source.dtype.scalar, target.scalar) == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle((source.data.astype(np.uint32) << 16).view(np.float32), target.scalar)
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, target)
        bits = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16).numpy()
        return interpreter.TensorHandle(bits.view(np.uint16), target.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounded)


@triton.jit
def _tile_kernel(
    parts, out, n: tl.constexpr, k: tl.constexpr, load: tl.constexpr, settings: tl.constexpr, block: tl.constexpr
):
    columns = tl.program_id(0) * 32 + tl.arange(0, 32)
    start = tl.program_id(1) * block
    depth = start + tl.arange(0, block)
    mask = (columns < n)[:, None] & (depth < k)[None, :]
    tile = load(parts, columns[:, None], (columns < n)[:, None], start, block, n, k, settings)
    tl.store(out + columns[:, None] * k + depth[None, :], tile.to(tl.float32), mask=mask)


@pytest.mark.parametrize(("dtype", "block"), [("float32", 16), ("float32", 64), ("bfloat16", 32), ("float16", 128)])
@pytest.mark.parametrize("spec", SPECS)
def test_tiles_are_decoded_to_the_same_bits(spec: str, dtype: str, block: int) -> None:
    words = spec + ("," if ":" in spec else ":") + f"dtype={dtype}"
    chosen, (outputs, inputs) = formats.parse(words), (40, 96)
    if getattr(chosen, "kind", "") in OF_256:
        inputs = 512
    parts = random_parts(chosen, outputs, inputs, 1, wild=True)
    tile = chosen.tile()
    assert tile is not None
    out, expected = torch.full((outputs, inputs), 7.0, device=DEVICE), torch.empty((outputs, inputs), device=DEVICE)
    grid: Any = _tile_kernel[(2, triton.cdiv(inputs, block))]
    grid(tuple(parts), out, outputs, inputs, tile.function, tile.settings, block)
    decoded = expected.to(formats.element_type(dtype))
    chosen.decode(parts, decoded)
    expected = decoded.float()
    assert torch.equal(out.isnan(), expected.isnan())
    same = out.nan_to_num(1.0).view(torch.int32) == expected.nan_to_num(1.0).view(torch.int32)
    assert same.all()


def both(family: str, spec: str) -> tuple[samples.Sample, samples.Sample]:
    size = 256 if spec.partition("kind=")[2] in OF_256 else 32
    sizes = {"hidden_size": max(64, size), "intermediate_size": size, "moe_intermediate_size": size}
    if family == "gpt_oss":
        del sizes["moe_intermediate_size"]
    dense = samples.sample_of(*samples.spec_of(family, **sizes), torch.float32)
    words = spec + ("," if ":" in spec else ":") + "dtype=float32"
    return dense, encoded_sample(dense, formats.parse(words))


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


@pytest.mark.parametrize("spec", SPECS[::4] if CUDA else SPECS)  # each is compiled there
def test_matrices_are_written_out_to_the_same_bits(spec: str) -> None:
    packed = both("qwen3_moe", spec)[1]
    linear = GroupedKernels(packed.arena, packed.layout, packed.spec).experts.up
    decode = MatrixDecoder.of(linear)
    assert decode is not None
    rows = [0, 6, 2]
    found = decode(rows)
    assert found is not None
    for number, row in enumerate(rows):
        assert torch.equal(found[number], linear.matrix(row).T)


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
