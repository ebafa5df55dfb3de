"""Formats of published checkpoints: decoded to the bits of their definition, on any codes, and of their libraries."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import published  # noqa: E402
from published import PUBLISHED, Published, Tensors  # noqa: E402

from hotset import formats  # noqa: E402
from hotset.errors import FormatError, HotsetError  # noqa: E402
from hotset.formats import StoredModule  # noqa: E402
from hotset.formats.fp8 import Fp8  # noqa: E402
from hotset.formats.integer import Integer  # noqa: E402
from hotset.formats.mxfp4 import Mxfp4  # noqa: E402
from hotset.models.encoded import EncodedTensor, fold, refuse_codes  # noqa: E402
from hotset.store.header import StoredTensor  # noqa: E402
from hotset.store.layout import ITEM_BYTES  # noqa: E402

DTYPES = ["float32", "bfloat16", "float16"]
OUTPUTS, INPUTS = 40, 96


class Config:
    """As transformers has it once hotset has hidden how the checkpoint is quantised."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._hotset_quantization = settings


SCRATCH = tempfile.TemporaryDirectory()


def stored(tensors: Tensors) -> dict[str, StoredTensor]:
    """The tensors of a module in a file."""
    file, found, at = Path(SCRATCH.name, "weights"), {}, 0
    file.write_bytes(b"".join(published.raw(tensor.reshape(-1)).tobytes() for tensor in tensors.values()))
    for word, tensor in tensors.items():
        dtype, size = str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size()
        found[f"m.{word}"] = StoredTensor(file, dtype, tuple(tensor.shape), at, size, f"m.{word}")
        at += size
    return found


def encoded(kind: Published, tensors: Tensors, dtype: str) -> tuple[Any, list[Any]]:
    """What hotset finds in a checkpoint's module: the format, and the parts of the matrix."""
    folded = fold(stored(tensors), Config(kind.config), dtype)
    (one,) = folded.values()
    assert isinstance(one, EncodedTensor)
    assert one.name == "m.weight"
    views = []
    for part in one.parts:
        tensor = tensors[part.name.removeprefix("m.")].contiguous()
        views.append(tensor.view(-1).view(torch.uint8).view(formats.element_type(part.dtype)).view(part.shape))
    return one.format, views


def numbers_of(chosen: Any, parts: list[Any]) -> Any:
    out = torch.empty(chosen.shape(parts), dtype=formats.element_type(chosen.dtype))
    chosen.decode(parts, out)
    return out


def assert_bits(found: Any, expected: Any, dtype: str) -> None:
    """The same numbers to the bit, but for which of the NaNs."""
    rounded = published.ROUND[dtype](expected)
    ours = found.float().numpy()
    assert np.array_equal(np.isnan(ours), np.isnan(rounded))
    ours, rounded = np.nan_to_num(ours, nan=1.0), np.nan_to_num(rounded, nan=1.0)
    assert np.array_equal(ours.view(np.uint32), rounded.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_matrix_is_found_and_decoded(name: str, dtype: str) -> None:
    kind = PUBLISHED[name]
    matrix = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1)) * 0.1
    tensors = kind.encode(matrix)
    chosen, parts = encoded(kind, tensors, dtype)
    assert chosen.dtype == dtype
    found = numbers_of(chosen, parts)
    assert (found.float() - matrix).abs().max() < 0.2 * matrix.abs().max()
    assert_bits(found, kind.decode(tensors), dtype)
    assert formats.parse(chosen.spec) == chosen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.filterwarnings("ignore")
def test_any_bytes_are_decoded_by_definition(name: str, dtype: str) -> None:
    """Zeros, subnormal numbers, the largest, and codes that are no numbers, all over codes and all over scales."""
    kind = PUBLISHED[name]
    random = torch.Generator().manual_seed(2)
    tensors = kind.encode(torch.randn(OUTPUTS, INPUTS, generator=random))
    for word, tensor in tensors.items():
        if word not in ("g_idx", "weight_g_idx", "weight_shape", "input_scale"):
            data = torch.randint(256, (tensor.numel() * tensor.element_size(),), generator=random, dtype=torch.uint8)
            tensors[word] = data.view(tensor.dtype).view(tensor.shape)
    for first in (None, 0, 2, 6, 10):  # limits that a lone scale takes in turn
        if first is not None:
            tensors |= {word: published.extremes(tensors[word], first) for word in tensors if is_scale(word)}
        chosen, parts = encoded(kind, tensors, dtype)
        assert_bits(numbers_of(chosen, parts), kind.decode(tensors), dtype)


def is_scale(word: str) -> bool:
    """Whether a tensor is of scales that a matrix is multiplied with."""
    return "scale" in word and word != "input_scale"


@pytest.mark.parametrize("name", PUBLISHED)
def test_matrices_below_each_other_are_one(name: str) -> None:
    """As gate and up are: what a device has of two equals what the checkpoint has of each."""
    kind = PUBLISHED[name]
    found, pieces = [], []
    for seed in (3, 4):
        tensors = kind.encode(torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(seed)))
        chosen, parts = encoded(kind, tensors, "float32")
        found.append(numbers_of(chosen, parts))
        pieces.append((chosen, parts))
    for device in ("cpu", "cuda"):
        target = chosen.on(device, [OUTPUTS, OUTPUTS])
        wanted = target.parts(2 * OUTPUTS, INPUTS)
        out = [torch.full(part.shape, 77).to(formats.element_type(part.dtype)) for part in wanted]
        target.fill(pieces, out)
        assert torch.equal(numbers_of(target, out), torch.cat(found))
        x = torch.randn(3, INPUTS)
        product = torch.empty(3, 2 * OUTPUTS)
        target.product(x, target.operand(out), product)
        assert torch.equal(product, x @ torch.cat(found).T)
        if target.holds(chosen) and target.stacks([OUTPUTS, OUTPUTS], INPUTS):
            direct = [torch.cat([parts[number] for _, parts in pieces]) for number in range(len(out))]
            assert all(torch.equal(one, other) for one, other in zip(direct, out, strict=True))


def test_what_can_be_read_straight_from_a_checkpoint() -> None:
    direct = {
        name: target.holds(chosen) and target.stacks([64, 64], 96)
        for name, kind in PUBLISHED.items()
        for chosen in [encoded(kind, kind.encode(torch.randn(64, 96)), "bfloat16")[0]]
        for target in [chosen.on("cuda", [64, 64])]
    }
    assert {name for name, straight in direct.items() if not straight} == {
        "fp8, partial blocks", "fp8, one scale", "int4, asymmetric", "int4, any order",
        "int8, asymmetric, any order", "gptq", "gptq, version 2, any order", "gptq, static groups, any order",
        "gptq, 8 bits, any order", "awq",
    }  # fmt: skip


def test_transformers_decodes_fp8_and_fp4_alike() -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    stock = fp8.Fp8Dequantize(None)
    random = torch.Generator().manual_seed(5)
    codes = torch.randint(256, (64, 96), generator=random, dtype=torch.uint8)
    for kind, scales in (("float32", torch.rand(4, 3, generator=random)), ("e8m0", torch.randint(1, 255, (4, 3)))):
        held = scales if kind == "float32" else scales.to(torch.uint8)
        given = scales if kind == "float32" else held.view(torch.float8_e8m0fnu)
        for dtype in (torch.float32, torch.bfloat16):
            expected = stock._dequantize_one(codes.view(torch.float8_e4m3fn), given, dtype)
            chosen = Fp8(str(dtype).removeprefix("torch."), 16, 32, kind)
            assert torch.equal(numbers_of(chosen, [codes, held]).nan_to_num(7), expected.nan_to_num(7))
    powers = torch.randint(0, 255, (64, 3), generator=random, dtype=torch.uint8)
    packed = codes[:, :48].contiguous()
    expected = stock._dequantize_one(packed.view(torch.int8), powers.view(torch.float8_e8m0fnu), torch.bfloat16)
    assert torch.equal(numbers_of(Mxfp4("bfloat16"), [packed, powers]), expected)


def test_transformers_decodes_the_blocks_of_gpt_oss_alike() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    random = torch.Generator().manual_seed(6)
    codes = torch.randint(256, (2, 64, 3, 16), generator=random, dtype=torch.uint8)
    powers = torch.randint(0, 255, (2, 64, 3), generator=random, dtype=torch.uint8)
    expected = mxfp4.convert_moe_packed_tensors(codes, powers)
    for expert in range(2):
        found = numbers_of(Mxfp4(), [codes[expert].view(64, 48), powers[expert]])
        assert torch.equal(found.T, expected[expert])


@pytest.mark.parametrize(
    ("chosen", "least"),
    [(Integer("float32", bits=8), 45.4), (Integer("float32"), 21.7), (Mxfp4(), 18.9)],
)
def test_what_hotset_makes_is_close(chosen: Any, least: float) -> None:
    """Signal to noise in decibels of numbers from a normal distribution, beside what others' searches come to."""
    matrix = torch.randn(128, 1024, generator=torch.Generator().manual_seed(7)) * 0.02
    matrix[3, 32:64] = 0
    matrix[4, :32] = 1e-38
    parts = [torch.empty(p.shape, dtype=formats.element_type(p.dtype)) for p in chosen.parts(128, 1024)]
    chosen.encode(matrix, parts)
    found = numbers_of(chosen, parts).float()
    assert not found[3, 32:64].any()
    noise = (found - matrix).square().mean()
    assert 10 * torch.log10(matrix.square().mean() / noise) > least


@pytest.mark.parametrize("chosen", [Integer(), Mxfp4()])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_numbers_that_are_none_are_not_packed(chosen: Any, odd: float) -> None:
    matrix = torch.ones(4, 64)
    matrix[2, 5] = odd
    parts = [torch.empty(p.shape, dtype=formats.element_type(p.dtype)) for p in chosen.parts(4, 64)]
    with pytest.raises(FormatError, match="not finite"):
        chosen.encode(matrix, parts)


@pytest.mark.parametrize("spec", ["fp8", "nvfp4", "integer:zeros=bytes", "gptq", "awq"])
def test_what_hotset_reads_only_is_not_made(spec: str) -> None:
    with pytest.raises(FormatError, match="does not make it"):
        formats.parse(spec).encode(torch.ones(64, 128), [])


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("mxfp4", (4, 48)), ("nvfp4", (4, 24)), ("nvfp4:matrices=2", (5, 32)), ("integer", (4, 48)),
        ("integer:group=0", (4, 7)), ("integer:ordered=2,group=16", (5, 32)), ("gptq:group=16", (12, 64)),
        ("gptq:group=16", (16, 60)), ("awq:group=16", (12, 64)), ("awq", (16, 64)),
    ],
)  # fmt: skip
def test_shapes_that_do_not_divide(spec: str, shape: tuple[int, int]) -> None:
    with pytest.raises(FormatError) as caught:
        formats.parse(spec).parts(*shape)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        "fp8:scales=float64", "fp8:scales=uint8", "integer:bits=3", "integer:bits=0", "integer:scales=int8",
        "integer:zeros=some", "gptq:bits=3", "awq:bits=8", "nvfp4:matrices=0", "gptq:scales=int8",
    ],
)  # fmt: skip
def test_options_that_are_none(spec: str) -> None:
    with pytest.raises(FormatError):
        formats.parse(spec)


def _damages() -> list[Any]:
    """Tensors of a module that are not what they should be: by format, the word, and what to make of it."""
    damages = []
    for name, kind in PUBLISHED.items():
        for word, tensor in kind.encode(torch.randn(48, 96)).items():
            if word in ("weight_shape", "input_scale") or tensor.dim() == 0 or (word == "g_idx" and "any" not in name):
                continue
            if word != "weight" or tensor.dtype != torch.float8_e4m3fn:  # that is a matrix of fewer outputs
                damages += [pytest.param(name, word, "cut", id=f"{name}: {word} cut")]
            if word != "weight":
                damages += [pytest.param(name, word, "type", id=f"{name}: {word} of another type")]
    return damages


@pytest.mark.parametrize(("name", "word", "how"), _damages())
def test_damaged_tensors_are_refused_by_name(name: str, word: str, how: str) -> None:
    kind = PUBLISHED[name]
    tensors = kind.encode(torch.randn(48, 96))
    tensors[word] = tensors[word][:-1].clone() if how == "cut" else tensors[word].double()
    said = refusal(kind, tensors)
    assert "m." in said
    assert "\n" not in said


def refusal(kind: Published, tensors: Tensors) -> str:
    """Why tensors are refused: now, or, where none of the formats sees itself in them, once they are needed."""
    try:
        folded = fold(stored(tensors), Config(kind.config), "bfloat16")
        for key, tensor in folded.items():
            refuse_codes(key, tensor)
    except HotsetError as error:
        return str(error)
    return "m. is missing" if "m.weight" not in folded else ""


@pytest.mark.parametrize(
    "change",
    [
        {"config_groups": None}, {"config_groups": []}, {"config_groups": {"a": 3}}, {"config_groups": {"a": {}}},
        {"config_groups": {"a": {"weights": {"num_bits": 3, "group_size": 32}}}},
        {"config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 64}}}},
        {"config_groups": {"a": {"weights": {"num_bits": "4", "group_size": 32}}}},
        {"config_groups": {"a": {"weights": {"num_bits": 4, "group_size": "32"}}}},
    ],
)  # fmt: skip
def test_configs_that_say_something_else(change: dict[str, Any]) -> None:
    kind = PUBLISHED["int4, Kimi-K2"]
    tensors = kind.encode(torch.randn(48, 96))
    with pytest.raises(HotsetError, match=r"m\.weight_packed"):
        fold(stored(tensors), Config(kind.config | change), "bfloat16")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gptq", {"bits": 3}), ("gptq", {"bits": None}), ("gptq", {"group_size": 7}), ("gptq", {"group_size": None}),
        ("awq", {"bits": 8}), ("awq", {"version": "gemv"}), ("awq", {"group_size": 1 << 40}),
    ],
)  # fmt: skip
def test_words_in_other_variants(name: str, change: dict[str, Any]) -> None:
    kind = PUBLISHED[name]
    with pytest.raises(HotsetError, match=r"m\.(q?weight|scales)"):
        fold(stored(kind.encode(torch.randn(48, 96))), Config(kind.config | change), "bfloat16")


def test_plain_modules_are_left_alone() -> None:
    for tensors in ({"weight": torch.randn(8, 8)}, {"weight": torch.randn(8), "bias": torch.randn(8)}):
        for name in formats.names():
            found = formats._class(name).detect(StoredModule(stored_words(tensors), {}, "bfloat16"))
            assert not found


def stored_words(tensors: Tensors) -> dict[str, StoredTensor]:
    return {name.removeprefix("m."): tensor for name, tensor in stored(tensors).items()}


WORDS = (
    "weight", "weight_scale_inv", "weight_scale", "weight_scale_2", "weight_packed", "weight_global_scale", "scale",
    "weight_zero_point", "weight_g_idx", "weight_shape", "qweight", "qzeros", "scales", "g_idx", "w_blocks", "w_scales",
)  # fmt: skip
TYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e8m0fnu", "uint8", "int8", "int32", "int64", "bool")
SIZES = st.sampled_from([0, 1, 2, 3, 4, 8, 16, 32, 64, 96, 1 << 40])


@settings(max_examples=400, deadline=None)
@given(
    st.dictionaries(st.sampled_from(WORDS), st.tuples(st.sampled_from(TYPES), st.lists(SIZES, max_size=4)), max_size=5),
    st.dictionaries(
        st.sampled_from(["quant_method", "bits", "group_size", "weight_block_size", "config_groups", "version"]),
        st.sampled_from(
            ["gptq", "awq", "fp8", 4, 8, 0, -1, 16, 1 << 70, None, [16, 16], [0, 0], [1], ["a", "b"], {}, {"a": None}]
        ),
    ),
)
def test_any_header_is_read_or_refused_in_a_line(module: dict[str, Any], config: dict[str, Any]) -> None:
    """Nothing is read or allocated, however large a tensor is said to be."""
    tensors = {}
    for word, (dtype, shape) in module.items():
        size = int(np.prod(np.array(shape, dtype=object))) * ITEM_BYTES[dtype] if shape else ITEM_BYTES[dtype]
        tensors[f"m.{word}"] = StoredTensor(Path("f"), dtype, tuple(shape), 0, size, f"m.{word}")
    try:
        folded = fold(tensors, Config(config), "bfloat16")
    except HotsetError as error:
        found = str(error)
    else:
        found = ""
        for one in folded.values():
            if isinstance(one, EncodedTensor):
                wanted = one.format.parts(*one.shape[-2:])
                assert [part.shape[len(one.shape) - 2 :] for part in one.parts] == [part.shape for part in wanted]
    assert "\n" not in found
