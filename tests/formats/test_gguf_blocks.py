"""Blocks of GGUF are decoded to the bits of the `gguf` package, whatever codes and scales they have."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

import numpy as np  # noqa: E402

from hotset.errors import FormatError  # noqa: E402
from hotset.formats import parse  # noqa: E402
from hotset.formats.gguf import KEPT, Gguf  # noqa: E402
from hotset.store.gguf import BLOCKS, TYPES  # noqa: E402

OTHERS = ("Q2_K", "Q3_K", "IQ2_XXS", "IQ3_S", "IQ1_M", "TQ2_0", "NVFP4")
HALVES = (0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFFFF)
"""Zeros, subnormals, the least and the largest numbers, infinities, and codes for no number."""


def same_bits(blocks: np.ndarray, kind: str) -> None:
    with np.errstate(all="ignore"):
        wanted = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    found = torch.empty(wanted.shape)
    Gguf("float32", kind).decode([torch.from_numpy(blocks)], found)
    none = np.isnan(wanted)
    assert np.array_equal(none, found.isnan().numpy())
    assert np.array_equal(wanted.view(np.int32)[~none], found.numpy().view(np.int32)[~none])


def test_types_are_those_of_ggml() -> None:
    for number, kind in TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (kind.name, (kind.weights, kind.size_bytes)) == (theirs.name, gguf.GGML_QUANT_SIZES[theirs])


@pytest.mark.parametrize("kind", [*KEPT, *OTHERS])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_any_bytes(kind: str) -> None:
    size = BLOCKS[kind].size_bytes
    rng = np.random.default_rng(7)
    same_bits(rng.integers(0, 256, (67, 5 * size), dtype=np.uint8), kind)
    for byte in (0, 0x7F, 0x80, 0xFF):
        same_bits(np.full((2, 3 * size), byte, np.uint8), kind)


@pytest.mark.parametrize("kind", KEPT)
def test_every_kind_of_scale(kind: str) -> None:
    """Each float16 of a block in turn is each odd number, whatever the codes."""
    size = BLOCKS[kind].size_bytes
    places = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,))
    for place in places:
        blocks = np.random.default_rng(place).integers(0, 256, (len(HALVES) * 4, size), dtype=np.uint8)
        blocks[:, place : place + 2] = np.repeat(np.array(HALVES, np.uint16), 4).view(np.uint8).reshape(-1, 2)
        same_bits(blocks, kind)


def test_every_exponent_of_mxfp4() -> None:
    blocks = np.random.default_rng(1).integers(0, 256, (256, 17), dtype=np.uint8)
    blocks[:, 0] = np.arange(256)
    same_bits(blocks, "MXFP4")


@pytest.mark.parametrize("kind", KEPT)
def test_numbers_are_rounded_once(kind: str) -> None:
    blocks = np.random.default_rng(3).integers(0, 60, (9, 4 * BLOCKS[kind].size_bytes), dtype=np.uint8)
    wanted = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])).to(torch.bfloat16)
    chosen = Gguf("bfloat16", kind)
    found = torch.empty(wanted.shape, dtype=torch.bfloat16)
    chosen.decode([torch.from_numpy(blocks)], found)
    assert torch.equal(found, wanted)
    assert chosen.shape([torch.from_numpy(blocks)]) == tuple(wanted.shape)
    x = torch.randn(3, wanted.shape[1]).to(torch.bfloat16)
    out = torch.empty(3, 9, dtype=torch.bfloat16)
    chosen.product(x, chosen.operand([torch.from_numpy(blocks)]), out)
    torch.testing.assert_close(out, x @ wanted.T)


def test_a_format_in_words() -> None:
    assert parse("gguf:kind=Q4_K").spec == "gguf:kind=Q4_K"
    assert parse("gguf:kind=Q6_K").size_bytes(3, 512) == 3 * 420
    with pytest.raises(FormatError, match="there are"):
        parse("gguf:kind=Q4_Q")
    with pytest.raises(FormatError, match="multiple"):
        parse("gguf:kind=Q4_K").parts(4, 288)
