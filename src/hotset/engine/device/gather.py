"""Fetches what an event misses straight from pinned host memory, by a kernel: the host need not know what it is."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

PROGRAMS, BLOCK_WORDS, WARPS = 128, 2048, 8
"""The fastest of some forty settings on an H200: 49 of the link's 55 GB/s, from 9 MB on."""


@triton.jit
def _gather(
    host, rows, host_row_of, loads, missing, job_row,
    layer, experts, words, slot_words, host_words, programs: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Copy every missing expert to its row, block by block; the programs share all blocks of all experts."""
    blocks = (words + block - 1) // block
    total = tl.load(missing) * blocks
    for at in range(tl.program_id(0), total, programs):
        job = at // blocks
        expert = tl.load(loads + 4 * job)
        source = host + tl.load(host_row_of + layer * experts + expert).to(tl.int64) * host_words
        target = rows + tl.load(job_row + job).to(tl.int64) * slot_words
        place = (at % blocks) * block + tl.arange(0, block)
        there = place < words
        values = tl.load(source + place, mask=there, other=0, eviction_policy="evict_first")
        tl.store(target + place, values, mask=there)


class Gather:
    """Copies between the RAM tier and the slots, both as words of eight bytes."""

    def __init__(self, host: Tensor, rows: Tensor, slot_bytes: int, used_bytes: list[int], host_row_of: Tensor) -> None:
        self.host, self.rows, self.host_row_of = host.view(torch.int64), rows.view(torch.int64), host_row_of
        self.slot_words = slot_bytes // 8
        self.words = [-(-used // 8) for used in used_bytes]

    def __call__(self, layer: int, loads: Tensor, missing: Tensor, job_row: Tensor) -> None:
        """Put the copies of one event into the stream."""
        launch: Any = _gather[(PROGRAMS,)]
        launch(
            self.host, self.rows, self.host_row_of, loads, missing, job_row, layer, self.host_row_of.shape[1],
            self.words[layer], self.slot_words, self.slot_words, PROGRAMS, BLOCK_WORDS, num_warps=WARPS,
        )  # fmt: skip
