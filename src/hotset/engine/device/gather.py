"""Copies what an event misses straight from pinned host memory, by a kernel: the host need not know what it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor


class Work(NamedTuple):
    """How a copy is shared: among so many programs, in blocks of so many words of eight bytes."""

    programs: int
    block: int
    warps: int


DEMAND = Work(128, 2048, 8)
"""The fastest of some forty settings on an H200: 49 of the link's 55 GB/s, from 9 MB on."""
PREFETCH = Work(64, 1024, 4)
"""Few and small: an event that begins waits until these 512 KiB have arrived, some 10 us."""


class Prefetched(NamedTuple):
    """What prefetch has brought of an event's loads."""

    job_queued: Tensor  # int32 [most loads], the place of each load in the queue, or -1 if it was not prefetched
    progress: Tensor  # int32 [programs], of all blocks of the queue the first that each program has not copied


@triton.jit
def _copy(source, target, first, words, block: tl.constexpr):
    """Copy one block of an expert."""
    place = first + tl.arange(0, block)
    there = place < words
    values = tl.load(source + place, mask=there, other=0, eviction_policy="evict_first")
    tl.store(target + place, values, mask=there)


@triton.jit(do_not_specialize=["layer"])
def gather(
    host, rows, host_row_of, loads, missing, job_row, prefetched, layer, words, slot_words,
    experts: tl.constexpr, programs: tl.constexpr, block: tl.constexpr, has_prefetched: tl.constexpr,
    prefetch_programs: tl.constexpr, prefetch_block: tl.constexpr,
):  # fmt: skip
    """Copy every missing expert to its row, but for the blocks that were prefetched; programs share all blocks."""
    blocks = (words + block - 1) // block
    prefetch_blocks = (words + prefetch_block - 1) // prefetch_block
    total = tl.load(missing) * blocks
    for at in range(tl.program_id(0), total, programs):
        job = at // blocks
        expert = tl.load(loads + 4 * job)
        source = host + tl.load(host_row_of + layer * experts + expert).to(tl.int64) * slot_words
        target = rows + tl.load(job_row + job).to(tl.int64) * slot_words
        first = (at % blocks) * block
        if not has_prefetched:
            _copy(source, target, first, words, block)
        else:
            queued = tl.load(prefetched.job_queued + job)
            if queued < 0:
                _copy(source, target, first, words, block)
            else:
                for part in tl.static_range(block // prefetch_block):
                    number = queued * prefetch_blocks + first // prefetch_block + part
                    if number >= tl.load(prefetched.progress + number % prefetch_programs):
                        _copy(source, target, first + part * prefetch_block, words, prefetch_block)


class Gather:
    """Copies between the RAM tier and the rows of the arena, both as words of eight bytes.

    `used_bytes` is what an expert of each layer takes of a slot, and `host_row_of` (int32 [layers, experts]) where
    experts lie in the RAM tier.
    """

    def __init__(
        self,
        host: Tensor,
        rows: Tensor,
        slot_bytes: int,
        used_bytes: Sequence[int],
        host_row_of: Tensor,
        demand: Work | None = None,
        prefetch: Work = PREFETCH,
    ) -> None:
        self.demand, self.prefetch = demand or DEMAND, prefetch
        if self.demand.block % prefetch.block:
            raise ValueError(f"{prefetch} does not go with {self.demand}")
        self.host, self.rows, self.host_row_of = host.view(torch.int64), rows.view(torch.int64), host_row_of
        self.slot_words = slot_bytes // 8
        self.words = [-(-used // 8) for used in used_bytes]

    def __call__(
        self, layer: int, loads: Tensor, missing: Tensor, job_row: Tensor, prefetched: Prefetched | None = None
    ) -> None:
        """Put the copies of one event into the stream."""
        launch: Any = gather[(self.demand.programs,)]
        launch(
            self.host, self.rows, self.host_row_of, loads, missing, job_row, prefetched, layer, self.words[layer],
            self.slot_words, experts=self.host_row_of.shape[1], programs=self.demand.programs, block=self.demand.block,
            has_prefetched=prefetched is not None, prefetch_programs=self.prefetch.programs,
            prefetch_block=self.prefetch.block, num_warps=self.demand.warps,
        )  # fmt: skip
