"""Tiles of formats of few bits, and whole matrices of them, to the bits of their decoders."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton")
import tiny_device  # noqa: E402
import triton.language as tl  # noqa: E402
from packed_samples import OF_256, SPECS, both, random_parts, round_as_devices_do  # noqa: E402
from tiny_device import DEVICE  # noqa: E402

from hotset import formats  # noqa: E402
from hotset.engine.kernels.decoding import MatrixDecoder  # noqa: E402
from hotset.engine.kernels.grouped import GroupedKernels  # noqa: E402

pytestmark = [
    pytest.mark.skipif(tiny_device.LATE, reason="the interpreter came too late"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def _rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    round_as_devices_do(monkeypatch)


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


@pytest.mark.parametrize("spec", SPECS[::4] if CUDA else SPECS)  # each is compiled there
def test_matrices_are_written_out_to_the_same_bits(spec: str) -> None:
    packed = both("qwen3_moe", spec)[1]
    linear = GroupedKernels(packed.arena, packed.layout, packed.spec).experts.up
    decode = MatrixDecoder.of(linear)
    assert decode is not None
    rows = [0, 6, 2]
    found = decode(torch.tensor(rows, dtype=torch.int32, device=packed.arena.memory.device))
    assert found is not None
    for number, row in enumerate(rows):
        assert torch.equal(found[number], linear.matrix(row).T)
