"""Weight formats by their published layouts: encoders for tiny checkpoints, and decoders with no code of hotset.

Decoders go by the definition of each format, in numpy and integers; what they return is rounded as the defining library
rounds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]
Numbers = np.ndarray[Any, Any]


def bits_of(code: int, exponent_bits: int, fraction_bits: int, bias: int) -> float:
    """A small floating-point number from its code, by definition."""
    fraction, exponent = code & ((1 << fraction_bits) - 1), (code >> fraction_bits) & ((1 << exponent_bits) - 1)
    sign = -1.0 if code >> (exponent_bits + fraction_bits) & 1 else 1.0
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias - fraction_bits)
    return sign * (1 + fraction * 2.0**-fraction_bits) * 2.0 ** (exponent - bias)


E2M1 = np.array([bits_of(code, 2, 1, 1) for code in range(16)], np.float32)
E4M3 = np.array([np.nan if code & 127 == 127 else bits_of(code, 4, 3, 7) for code in range(256)], np.float32)
E8M0 = np.array([*(2.0 ** (code - 127) for code in range(255)), np.nan], np.float64).astype(np.float32)


def as_bfloat16(numbers: Numbers) -> Numbers:
    """float32 rounded to bfloat16, to even, and back."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32)
    return np.where(np.isnan(numbers), np.float32(np.nan), rounded.view(np.float32))


ROUND: dict[str, Callable[[Numbers], Numbers]] = {
    "float32": lambda numbers: numbers.astype(np.float32),
    "bfloat16": as_bfloat16,
    "float16": lambda numbers: numbers.astype(np.float16).astype(np.float32),
}


def raw(tensor: torch.Tensor) -> Numbers:
    """The bytes of a tensor."""
    return np.array(tensor.contiguous().view(torch.uint8).numpy())


def plain(tensor: torch.Tensor) -> Numbers:
    """Scales as float32."""
    return np.array(tensor.float().numpy())


def low_first(data: Numbers) -> Numbers:
    """4-bit codes of bytes along the last dimension."""
    return np.stack([data & 15, data >> 4], -1).reshape(*data.shape[:-1], -1)


def repeated(scales: Numbers, rows: int, columns: int, outputs: int, inputs: int) -> Numbers:
    """Scales of blocks, once for each number."""
    return np.repeat(np.repeat(scales, rows, -2), columns, -1)[..., :outputs, :inputs]


def extremes(scales: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Scales that are all at a limit of their type: zeros, subnormal numbers, the largest, and what is no number.

    Those of one byte are all codes but 255, which is no number as an exponent, and one in some libraries.
    """
    count, kind = scales.numel(), scales.dtype
    if scales.element_size() == 1:
        return ((torch.arange(count) + 20 * first) % 255).to(torch.uint8).view(kind).view(scales.shape)
    info = torch.finfo(kind)
    least = info.tiny * info.eps  # the smallest above zero
    limits = [0.0, -0.0, least, -least, info.tiny - least, info.tiny, info.max, info.min, torch.inf, torch.nan, 1.0]
    places = (torch.arange(count) + first) % len(limits)
    return torch.tensor(limits, dtype=torch.float64).to(kind)[places].view(scales.shape)


# ------------------------------------------------------------------------------------------------ encoders of a matrix


def fp8(matrix: torch.Tensor, block: tuple[int, int], kind: torch.dtype, word: str = "weight_scale_inv") -> Tensors:
    outputs, inputs = matrix.shape
    rows, columns = -(-outputs // block[0]), -(-inputs // block[1])
    padded = torch.zeros(rows * block[0], columns * block[1])
    padded[:outputs, :inputs] = matrix
    tiles = padded.view(rows, block[0], columns, block[1])
    scales = (tiles.abs().amax((1, 3)) / 448).clamp(min=1e-12)
    if kind == torch.float8_e8m0fnu:
        scales = scales.log2().ceil().exp2()
    scales = scales.to(kind)
    codes = (tiles / scales.float()[:, None, :, None]).clamp(-448, 448).reshape(padded.shape)[:outputs, :inputs]
    return {"weight": codes.to(torch.float8_e4m3fn).contiguous(), word: scales}


def fp4_codes(numbers: torch.Tensor) -> torch.Tensor:
    return (numbers.abs()[..., None] - torch.from_numpy(E2M1[:8])).abs().argmin(-1) + 8 * (numbers < 0)


def bytes_of(codes: torch.Tensor) -> torch.Tensor:
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def mxfp4(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = matrix.unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2
    codes = fp4_codes(groups / exponent.exp2()[..., None]).flatten(-2)
    return bytes_of(codes), (exponent + 127).to(torch.uint8)


def nvfp4(matrix: torch.Tensor, divides: bool) -> Tensors:
    groups = matrix.unflatten(-1, (-1, 16))
    largest = groups.abs().amax(-1)
    whole = largest.max() / (448 * 6)
    scales = (largest / 6 / whole).clamp(max=448).to(torch.float8_e4m3fn)
    factors = scales.float() * whole
    codes = fp4_codes(groups / torch.where(factors == 0, 1, factors)[..., None]).flatten(-2)
    if divides:
        return {"weight_packed": bytes_of(codes), "weight_scale": scales, "weight_global_scale": (1 / whole).view(1)}
    return {
        "weight": bytes_of(codes), "weight_scale": scales, "weight_scale_2": whole.clone(),
        "input_scale": torch.tensor(0.5),
    }  # fmt: skip


def integers(
    matrix: torch.Tensor, bits: int, group: int, kind: torch.dtype, symmetric: bool, order: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (outputs, inputs), scales and zero points (outputs, groups), the groups those of ordered inputs."""
    last = (1 << bits) - 1
    given = matrix if order is None else matrix[:, order]
    groups = given.unflatten(-1, (-1, group))
    if symmetric:
        scales = (groups.abs().amax(-1) / (last // 2)).clamp(min=1e-9).to(kind)
        zeros = torch.full(scales.shape, (last + 1) // 2)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / last).clamp(min=1e-9).to(kind)
        zeros = (-low / scales.float()).round().clamp(0, last).long()
    codes = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, last).long().flatten(-2)
    if order is not None:
        codes = torch.empty_like(codes).scatter_(1, order.expand_as(codes), codes)
    return codes, scales, zeros


def words(codes: torch.Tensor, bits: int, dim: int, places: list[int] | None = None) -> torch.Tensor:
    """Codes in words of 32 bits along a dimension; `places` says where in a word each code goes."""
    per_word = 32 // bits
    moved = codes.movedim(dim, -1)
    short = -moved.shape[-1] % per_word
    moved = torch.nn.functional.pad(moved, (0, short)).unflatten(-1, (-1, per_word))
    shifts = torch.tensor([bits * place for place in places or range(per_word)])
    packed = (moved << shifts).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32).movedim(-1, dim).contiguous()


AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


# ------------------------------------------------------------------------------------------- checkpoints, both ways


@dataclass(frozen=True)
class Published:
    """A format of checkpoints: its encoder of a matrix, its decoder by definition, and what config.json says."""

    encode: Callable[[torch.Tensor], Tensors]
    decode: Callable[[Tensors], Numbers]  # float32, rounded to no other type than the library's own
    config: dict[str, Any]
    bytes_per_weight: float  # of the experts of the tests' model, at most

    def named(self, key: str, matrix: torch.Tensor) -> Tensors:
        """The tensors of a matrix under the names that a checkpoint gives them."""
        return {key.removesuffix("weight") + word: t.contiguous() for word, t in self.encode(matrix).items()}

    def back(self, matrix: torch.Tensor, dtype: str = "float32") -> torch.Tensor:
        """A matrix as it is once it was in the format."""
        return torch.from_numpy(np.ascontiguousarray(ROUND[dtype](self.decode(self.encode(matrix)))))


def decode_fp8(tensors: Tensors, block: tuple[int, int], word: str = "weight_scale_inv") -> Numbers:
    codes = raw(tensors["weight"])
    stored = tensors[word]
    scales = E8M0[raw(stored)] if stored.element_size() == 1 else plain(stored)
    return E4M3[codes] * repeated(np.atleast_2d(scales), *block, *codes.shape[-2:])


def decode_mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> Numbers:
    numbers = E2M1[low_first(raw(codes))]
    return numbers * np.repeat(E8M0[raw(scales)], 32, -1)


def decode_nvfp4(codes: torch.Tensor, scales: torch.Tensor, whole: torch.Tensor, divides: bool) -> Numbers:
    own, one = E4M3[raw(scales)], np.float32(whole.item())
    factors = (own / one if divides else own * one).astype(np.float32)
    return E2M1[low_first(raw(codes))] * np.repeat(factors, 16, -1)


def stream(words_: torch.Tensor, bits: int, dim: int, places: list[int] | None = None) -> Numbers:
    """The codes of words along a dimension, by integer arithmetic."""
    data = np.moveaxis(words_.numpy().astype(np.int64) & 0xFFFFFFFF, dim, -1)
    shifts = np.array([bits * place for place in places or range(32 // bits)])
    codes = (data[..., None] >> shifts) & ((1 << bits) - 1)
    return np.moveaxis(codes.reshape(*data.shape[:-1], -1), -1, dim)


def scaled(codes: Numbers, zeros: Numbers | int, scales: torch.Tensor, groups: Numbers) -> Numbers:
    """Integers less zero points, times scales, rounded to the scales' type; all (outputs, ...)."""
    zero = zeros if isinstance(zeros, int) else zeros[:, groups]
    product = (codes - zero).astype(np.float32) * plain(scales)[:, groups]
    return ROUND[str(scales.dtype).removeprefix("torch.")](product)


def any_order(inputs: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs in some order, and the group of each where groups follow each other in that order."""
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    in_order = (torch.arange(inputs) // group).to(torch.int32)
    return order, torch.empty_like(in_order).scatter_(0, order, in_order)


def ct_integer(
    bits: int, group: int, symmetric: bool, kind: torch.dtype = torch.bfloat16, *, by_index: bool = False
) -> Published:
    def encode(matrix: torch.Tensor) -> Tensors:
        order, index = any_order(matrix.shape[1], group) if by_index else (None, None)
        codes, scales, zeros = integers(matrix, bits, group or matrix.shape[1], kind, symmetric, order)
        found = {
            "weight_packed": words(codes, bits, 1), "weight_scale": scales, "weight_shape": torch.tensor(matrix.shape),
        }  # fmt: skip
        found |= {} if index is None else {"weight_g_idx": index}
        return found if symmetric else found | {"weight_zero_point": words(zeros, bits, 0)}

    def decode(tensors: Tensors) -> Numbers:
        codes, scales = stream(tensors["weight_packed"], bits, 1), tensors["weight_scale"]
        zeros: Any = 1 << (bits - 1)
        if not symmetric:
            zeros = stream(tensors["weight_zero_point"], bits, 0)[: len(codes)]
        index = np.arange(codes.shape[1]) // (group or codes.shape[1])
        return scaled(codes, zeros, scales, tensors["weight_g_idx"].numpy() if by_index else index)

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel"}
    weights["group_size"] = group or None  # type: ignore[assignment]
    config = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip
    if by_index:
        weights["actorder"] = "group"
    return Published(encode, decode, config, bits / 8 + (0.07 if symmetric else 0.2) + (0.2 if by_index else 0))


def gptq(bits: int, group: int, second: bool, by_index: bool, **config: Any) -> Published:
    def encode(matrix: torch.Tensor) -> Tensors:
        order, index = any_order(matrix.shape[1], group)
        if not by_index:
            order, index = None, index.sort().values  # type: ignore[assignment]
        codes, scales, zeros = integers(matrix, bits, group, torch.float16, False, order)
        kept = zeros if second else (zeros - 1) & ((1 << bits) - 1)
        return {
            "qweight": words(codes.T, bits, 0), "qzeros": words(kept.T, bits, 1), "scales": scales.T.contiguous(),
            "g_idx": index,
        }  # fmt: skip

    def decode(tensors: Tensors) -> Numbers:
        codes, zeros = stream(tensors["qweight"], bits, 0).T, stream(tensors["qzeros"], bits, 1).T
        if not second:
            zeros = (zeros + 1) % (1 << bits)
        return scaled(codes, zeros, tensors["scales"].T, tensors["g_idx"].numpy())

    said = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": by_index, "sym": False,
        "checkpoint_format": "gptq_v2" if second else "gptq", **config,
    }  # fmt: skip
    return Published(encode, decode, said, bits / 8 + (0.4 if by_index else 0.2))


def awq(group: int) -> Published:
    def encode(matrix: torch.Tensor) -> Tensors:
        codes, scales, zeros = integers(matrix, 4, group, torch.float16, False)
        return {
            "qweight": words(codes.T, 4, 1, AWQ_PLACES), "qzeros": words(zeros.T, 4, 1, AWQ_PLACES),
            "scales": scales.T.contiguous(),
        }  # fmt: skip

    def decode(tensors: Tensors) -> Numbers:
        codes, zeros = (stream(tensors[word], 4, 1, AWQ_PLACES).T for word in ("qweight", "qzeros"))
        return scaled(codes, zeros, tensors["scales"].T, np.arange(codes.shape[1]) // group)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Published(encode, decode, config, 0.7)


def blocks(side: tuple[int, int], kind: torch.dtype, word: str = "weight_scale_inv", **more: Any) -> Published:
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(side)}
    return Published(
        lambda matrix: fp8(matrix, side, kind, word),
        lambda tensors: decode_fp8(tensors, side, word),
        config | more,
        1.05,
    )


def packed_fp4(codes: str, scales: str, kind: torch.dtype, exponent: torch.dtype, **config: Any) -> Published:
    def encode(matrix: torch.Tensor) -> Tensors:
        data, powers = mxfp4(matrix)
        return {codes: data.view(kind), scales: powers.view(exponent)}

    return Published(encode, lambda tensors: decode_mxfp4(tensors[codes], tensors[scales]), config, 0.54)


CT = "compressed-tensors"
PUBLISHED = {
    "fp8, DeepSeek-V3": blocks((16, 16), torch.float32),
    "fp8, partial blocks": blocks((24, 24), torch.bfloat16),
    "fp8, exponents": blocks((16, 16), torch.float8_e8m0fnu, "scale"),
    "fp8, one scale": Published(
        lambda matrix: {k: v if k == "weight" else v.view(()) for k, v in fp8(
            matrix, (len(matrix), matrix.shape[1]), torch.float32, "weight_scale").items()},
        lambda tensors: decode_fp8(tensors, (1024, 1024), "weight_scale"),
        {"quant_method": "fp8"}, 1.05,
    ),
    "fp8, one scale per output": Published(
        lambda matrix: fp8(matrix, (1, matrix.shape[1]), torch.bfloat16, "weight_scale"),
        lambda tensors: decode_fp8(tensors, (1, 1024), "weight_scale"),
        {"quant_method": CT, "format": "float-quantized", "config_groups": {}}, 1.1,
    ),
    "mxfp8": Published(
        lambda matrix: {k: v.view(torch.uint8) if k != "weight" else v for k, v in fp8(
            matrix, (1, 32), torch.float8_e8m0fnu).items()},
        lambda tensors: decode_fp8(tensors, (1, 32)),
        {"quant_method": "mxfp8"}, 1.05,
    ),
    "fp4, DeepSeek-V4": packed_fp4("weight", "scale", torch.int8, torch.float8_e8m0fnu, quant_method="fp8"),
    "mxfp4, compressed-tensors": packed_fp4(
        "weight_packed", "weight_scale", torch.uint8, torch.uint8, quant_method=CT, format="mxfp4-pack-quantized"
    ),
    "nvfp4, modelopt": Published(
        lambda matrix: nvfp4(matrix, False),
        lambda t: decode_nvfp4(t["weight"], t["weight_scale"], t["weight_scale_2"], False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, 0.58,
    ),
    "nvfp4, compressed-tensors": Published(
        lambda matrix: nvfp4(matrix, True),
        lambda t: decode_nvfp4(t["weight_packed"], t["weight_scale"], t["weight_global_scale"], True),
        {"quant_method": CT, "format": "nvfp4-pack-quantized"}, 0.58,
    ),
    "int4, Kimi-K2": ct_integer(4, 32, True),
    "int8 in groups": ct_integer(8, 32, True),
    "int8 by row": ct_integer(8, 0, True, torch.float16),
    "int4, asymmetric": ct_integer(4, 16, False),
    "int4, any order": ct_integer(4, 16, True, by_index=True),
    "int8, asymmetric, any order": ct_integer(8, 32, False, by_index=True),
    "gptq": gptq(4, 16, second=False, by_index=False),
    "gptq, version 2, any order": gptq(4, 16, second=True, by_index=True),
    "gptq, static groups, any order": gptq(4, 16, second=False, by_index=True, desc_act=False),
    "gptq, 8 bits, any order": gptq(8, 32, second=False, by_index=True),
    "awq": awq(16),
}  # fmt: skip
"""Formats as checkpoints have them, with small blocks and groups where those may be small."""
