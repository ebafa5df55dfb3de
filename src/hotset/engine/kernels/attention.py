# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Attention of one new token over a static key-value cache: keys and values are read once, and only where shown.

The key length is split over the programs (flash decoding), and the query heads that share a key-value head are taken
together. Block by block the splits take turns, so that the keys seen so far, a small part of a long static cache, are
still shared by many programs. A program reads the mask first; what it hides is never loaded, and may hold anything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor
Result = tuple[Tensor, Tensor | None]
Attention = Callable[..., Result]

UNKNOWN = ("position_bias", "cache", "output_attentions")
"""Arguments that change what attention computes or returns, and that the kernel has no part for."""

LARGEST_ROW_BYTES = 1024
"""The widest key or value: 512 numbers of two bytes. Wider ones would spill out of the registers."""

TILE_BYTES = 16384
"""A block of keys; with as many values, twice over for loading ahead, it fits the smallest GPU's shared memory."""

ONE_PASS_KEYS, SPLIT_KEYS, SCANNED_KEYS = 256, 128, 2048
"""Caches up to the first are not split; splits have about the second at least, and the third at most."""

HIDDEN = tl.constexpr(-65504.0)  # the least float16: a mask that adds this or less hides the key, in every type


@triton.jit
def _mask_at(mask, places, inside, kind: tl.constexpr):
    """What the mask says of some keys: whether they are shown, and what is added to their scores."""
    shown = inside
    bias = tl.zeros_like(places).to(tl.float32)
    if kind == 1:
        shown = tl.load(mask + places, mask=inside, other=0) != 0
    if kind == 2:
        bias = tl.load(mask + places, mask=inside, other=float("-inf")).to(tl.float32)
        shown = bias > HIDDEN
    return shown, bias


@triton.jit
def _attend(
    q, k, v, mask, sinks, out, logs,
    q_b, q_h, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, m_b, m_h, m_n,
    length, splits, scale, softcap,
    kv_heads: tl.constexpr, group: tl.constexpr, parts: tl.constexpr, dim_k: tl.constexpr, dim_v: tl.constexpr,
    kind: tl.constexpr, mask_heads: tl.constexpr, has_sinks: tl.constexpr, has_cap: tl.constexpr,
    use_dot: tl.constexpr, scan: tl.constexpr,
    block_g: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Attend with the query heads of one key-value head to every splits-th block of keys."""
    unit = tl.program_id(0) // parts
    split = tl.program_id(1)
    batch = (unit // kv_heads).to(tl.int64)
    kv_head = unit % kv_heads
    member = (tl.program_id(0) % parts) * block_g + tl.arange(0, block_g)
    real = member < group
    head = kv_head * group + member
    at_k = tl.arange(0, block_k)
    at_v = tl.arange(0, block_v)
    at_n = tl.arange(0, block_n)
    in_k = (at_k < dim_k)[None, :]
    in_v = (at_v < dim_v)[None, :]
    mask += batch * m_b
    k += batch * k_b + kv_head.to(tl.int64) * k_h
    v += batch * v_b + kv_head.to(tl.int64) * v_h

    # The mask of the whole range in one load, so that a range without shown keys costs no more than that.
    index = tl.arange(0, scan)
    range_keys = ((split + index * splits) * block_n)[:, None] + at_n[None, :]
    range_kind: tl.constexpr = kind if mask_heads == 1 else 0
    range_shown, _ = _mask_at(mask, range_keys.to(tl.int64) * m_n, range_keys < length, range_kind)
    some = tl.max(range_shown.to(tl.int32), axis=1)
    first = tl.min(tl.where(some > 0, index, scan), axis=0)
    last = tl.max(tl.where(some > 0, index + 1, 0), axis=0)

    rows = q + batch * q_b + head[:, None] * q_h
    queries = tl.load(rows + at_k[None, :] * q_d, mask=real[:, None] & in_k, other=0.0)
    top = tl.full((block_g,), float("-inf"), tl.float32)
    total = tl.zeros((block_g,), tl.float32)
    if has_sinks:
        # A sink is a key with a score and no value; the first split has it.
        sunk = real & (split == 0)
        top = tl.load(sinks + head, mask=sunk, other=float("-inf")).to(tl.float32)
        total = sunk.to(tl.float32)
    sums = tl.zeros((block_g, block_v), tl.float32)

    for turn in range(first, last):
        keys = (split + turn * splits) * block_n + at_n
        wide = keys.to(tl.int64)
        if mask_heads == 1:
            places = (wide * m_n)[None, :]
            inside = (keys < length)[None, :]
        else:
            places = head[:, None] * m_h + (wide * m_n)[None, :]
            inside = real[:, None] & (keys < length)[None, :]
        shown, bias = _mask_at(mask, places, inside, kind)
        needed = (tl.max(shown.to(tl.int32), axis=0) > 0)[:, None]
        # Both loads before any compute: their latencies overlap. Hidden rows become zero, whatever lies there.
        tile_k = tl.load(k + wide[:, None] * k_n + at_k[None, :] * k_d, mask=needed & in_k, other=0.0)
        tile_v = tl.load(v + wide[:, None] * v_n + at_v[None, :] * v_d, mask=needed & in_v, other=0.0)
        if use_dot:
            scores = tl.dot(queries, tl.trans(tile_k), input_precision="ieee") * scale
        else:
            scores = tl.sum(tile_k.to(tl.float32) * queries.to(tl.float32), axis=1)[None, :] * scale
        if has_cap:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
        scores = tl.where(shown, scores + bias, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing shown yet: keep inf - inf away
        probabilities = tl.exp(scores - base[:, None])
        fade = tl.exp(top - base)
        total = total * fade + tl.sum(probabilities, axis=1)
        if use_dot:
            sums = sums * fade[:, None] + tl.dot(probabilities.to(tile_v.dtype), tile_v, input_precision="ieee")
        else:
            sums = sums * fade[:, None] + tl.sum(tl.trans(probabilities) * tile_v.to(tl.float32), axis=0)[None, :]
        top = new_top

    used = total != 0.0  # true of NaN, too: it must come out
    total = tl.where(used, total, 1.0)
    row = (batch * (kv_heads * group) + head) * splits + split
    kept = real & (used | (splits == 1))
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * dim_v + at_v[None, :], result, mask=kept[:, None] & in_v)
    if splits > 1:
        tl.store(logs + row, tl.where(used, top + tl.log(total), float("-inf")), mask=real)


@triton.jit
def _combine(
    partial_out, logs, out, splits,
    dim_v: tl.constexpr, block_s: tl.constexpr, block_v: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Add the splits of one query head, each weighted by its share of the softmax; unused ones are not read."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, block_s)
    at_v = tl.arange(0, block_v)
    mine = logs + row * splits
    values = tl.load(mine + index, mask=index < splits, other=float("-inf"))
    top = tl.max(values, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(values - top), axis=0)
    sums = tl.zeros((block_v,), tl.float32)
    for start in range(0, splits, chunk):
        some = start + tl.arange(0, chunk)
        shares = tl.exp(tl.load(mine + some, mask=some < splits, other=float("-inf")) - top)
        places = (row * splits + some)[:, None] * dim_v + at_v[None, :]
        read = (shares != 0.0)[:, None] & (at_v < dim_v)[None, :]
        sums += tl.sum(tl.load(partial_out + places, mask=read, other=0.0) * shares[:, None], axis=0)
    result = sums / tl.where(total != 0.0, total, 1.0)
    tl.store(out + row * dim_v + at_v, result.to(out.dtype.element_ty), mask=at_v < dim_v)


INTERPRETED = not isinstance(_attend, triton.JITFunction)
"""Whether Triton's interpreter runs the kernels, as it can on the CPU (TRITON_INTERPRET=1)."""


class Plan(NamedTuple):
    """How a call is cut into programs; known from the shapes alone, as a captured graph needs it."""

    use_dot: bool
    block_g: int
    parts: int
    block_n: int
    splits: int
    scan: int


def plan(batch: int, kv_heads: int, group: int, length: int, row_bytes: int, programs: int) -> Plan:
    """Blocks that fit into the shared memory of a small GPU, and enough splits to fill a large one."""
    use_dot = group > 1  # a single head has no use for a tile of sixteen
    block_g = min(max(triton.next_power_of_2(group), 16), 32) if use_dot else 1
    parts = triton.cdiv(group, block_g)
    block_n = min(max(TILE_BYTES // row_bytes, 16), 128, max(triton.next_power_of_2(length), 16))
    blocks = triton.cdiv(length, block_n)
    splits = min(triton.cdiv(programs, batch * kv_heads * parts), triton.cdiv(length, SPLIT_KEYS), blocks)
    splits = 1 if length <= ONE_PASS_KEYS else max(splits, triton.cdiv(length, SCANNED_KEYS))
    scan = triton.next_power_of_2(triton.cdiv(blocks, splits))
    return Plan(use_dot, block_g, parts, block_n, splits, scan)


@cache
def _programs(device: torch.device) -> int:
    """Two programs for each processor of a device."""
    if device.type != "cuda":
        return 264
    return 2 * int(torch.cuda.get_device_properties(device).multi_processor_count)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one token for each row of the batch, as [batch, 1, heads, head dim of the values]."""
    batch, heads, _, dim_k = query.shape
    kv_heads, length, dim_v = value.shape[1:]
    block_k, block_v = (max(triton.next_power_of_2(dim), 16) for dim in (dim_k, dim_v))
    row_bytes = max(block_k, block_v) * key.element_size()
    how = plan(batch, kv_heads, heads // kv_heads, length, row_bytes, _programs(query.device))
    out = query.new_empty(batch, 1, heads, dim_v)
    rows, split = batch * heads, how.splits > 1
    scratch = query.new_empty(rows, how.splits, dim_v, dtype=torch.float32) if split else out
    logs = query.new_empty(rows, how.splits, dtype=torch.float32) if split else out
    flags, strides, kind, mask_heads = _mask_arguments(mask, query)
    launch: Any = _attend[(batch * kv_heads * how.parts, how.splits)]
    launch(
        query, key, value, flags, query if sinks is None else sinks, scratch, logs,
        query.stride(0), query.stride(1), query.stride(3), *key.stride(), *value.stride(), *strides,
        length, how.splits, scaling, softcap or 1.0, kv_heads, heads // kv_heads, how.parts, dim_k, dim_v,
        kind, mask_heads, sinks is not None, bool(softcap), how.use_dot, how.scan,
        how.block_g, how.block_n, block_k, block_v, num_warps=4, num_stages=2,
    )  # fmt: skip
    if split:
        block_s = triton.next_power_of_2(how.splits)
        launch = _combine[(rows,)]
        launch(scratch, logs, out, how.splits, dim_v, block_s, block_v, min(block_s, 32), num_warps=4)
    return out


def _mask_arguments(mask: Tensor | None, query: Tensor) -> tuple[Tensor, tuple[int, int, int], int, int]:
    """The mask as the kernel takes it: memory, strides, kind (none, flags, added) and its number of heads."""
    if mask is None:
        return query, (0, 0, 0), 0, 1
    b, h, _, n = mask.expand(query.shape[0], -1, -1, -1).stride()
    flags = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return flags, (b, h, n), 1 if mask.dtype == torch.bool else 2, mask.shape[1]


def supports(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel can do this call: one new token, plain tensors, and a mask of a known shape."""
    batch, heads, tokens, dim = query.shape
    kv_heads, length = key.shape[1:3]
    alike = query.dtype == key.dtype == value.dtype and query.device == key.device == value.device
    return (
        tokens == 1
        and alike
        and query.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and (query.is_cuda or INTERPRETED)
        and key.shape[::3] == (batch, dim)
        and value.shape[:3] == key.shape[:3]
        and length > 0
        and heads % kv_heads == 0
        and max(dim, value.shape[3]) * key.element_size() <= LARGEST_ROW_BYTES
        and _mask_fits(mask, batch, heads, length)
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)))
    )


def _mask_fits(mask: Tensor | None, batch: int, heads: int, length: int) -> bool:
    """Whether a mask is absent, or has a flag or a number for every key."""
    if mask is None:
        return True
    right_type = mask.dtype == torch.bool or mask.is_floating_point()
    shapes = [(b, h, 1, length) for b in (1, batch) for h in (1, heads)]
    return right_type and tuple(mask.shape) in shapes


def decode_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    stock: Attention,
    **kwargs: Any,
) -> Result:
    """Attention as transformers calls it: one new token by our kernel, all else by the stock function.

    The sliding window is in the mask already, where sdpa and eager attention have it, too. A row whose keys are all
    hidden gives zeros.
    """
    known = all(kwargs.get(name) is None or kwargs[name] is False for name in UNKNOWN)
    if known and dropout == 0.0 and supports(query, key, value, attention_mask):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend(query, key, value, attention_mask, scale, softcap, s_aux), None
    optional = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
    given = {name: argument for name, argument in optional.items() if argument is not None}
    return stock(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **given, **kwargs)
