"""How fast a GPU reads experts from pinned host memory: by its copy engine, by loads, and by bulk copies.

python benchmarks/gpu_host_reads.py
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from hotset.engine.device.gather import Gather

from common import publish

SIZES = {9216 << 10: (1, 2, 8), 48608 << 10: (1, 2, 4)}
"""Bytes of an expert (Qwen3-30B-A3B, gpt-oss-20b), and how many are read at a time."""
CHUNKS, BLOCKS = ((4096, 8), (8192, 4), (16384, 2)), (8, 32, 132)
"""Bytes of a bulk copy and how many of them a block has under way; and numbers of blocks."""
SOURCES, TARGETS = (3, 9, 1, 7, 12, 5, 0, 11), (4, 2, 8, 0, 1, 13, 3, 9)
ROWS = 16
BULK = r"""
typedef unsigned long long u64; typedef unsigned int u32;
__device__ __forceinline__ u32 at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void load(const char* from, char* to, u32 size, u64* done) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at(done)), "r"(size) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(at(to)), "l"(from), "r"(size), "r"(at(done)) : "memory");
}
extern "C" __global__ void bulk(const char* host, char* rows, const int* sources, const int* targets, int count,
                                int kilobytes) {
  extern __shared__ __align__(128) char buffer[];
  __shared__ u64 done[STAGES];
  if (threadIdx.x) return;
  for (int i = 0; i < STAGES; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at(&done[i])));
  asm volatile("fence.mbarrier_init.release.cluster;");
  long size = (long)kilobytes * 1024;
  int chunks = (int)(size / CHUNK), total = count * chunks, next = blockIdx.x, turn = 0;
#define FROM(n) (host + (long)sources[(n) / chunks] * size + (long)((n) % chunks) * CHUNK)
#define TO(n) (rows + (long)targets[(n) / chunks] * size + (long)((n) % chunks) * CHUNK)
  for (int i = 0; i < STAGES && next < total; i++, next += gridDim.x)
    load(FROM(next), buffer + i * CHUNK, CHUNK, &done[i]);
  for (int n = blockIdx.x; n < total; n += gridDim.x, turn++) {
    int stage = turn % STAGES;
    u32 phase = (turn / STAGES) & 1, there = 0;
    while (!there)
      asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                   : "=r"(there) : "r"(at(&done[stage])), "r"(phase) : "memory");
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(TO(n)), "r"(at(buffer + stage * CHUNK)), "r"(CHUNK) : "memory");
    asm volatile("cp.async.bulk.commit_group;");
    if (next < total) {
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      load(FROM(next), buffer + stage * CHUNK, CHUNK, &done[stage]);
      next += gridDim.x;
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
"""


class Reads:
    """Experts of one size in host memory, and rows for them on the GPU."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.host = torch.zeros((ROWS, size_bytes), dtype=torch.uint8).pin_memory()
        self.rows = torch.zeros((ROWS, size_bytes), dtype=torch.uint8, device="cuda")
        self.sources, self.targets = (torch.tensor(n, dtype=torch.int32, device="cuda") for n in (SOURCES, TARGETS))
        where = torch.zeros((1, ROWS), dtype=torch.int32, device="cuda")
        where[0, : len(SOURCES)] = self.sources
        self.loads = torch.zeros((len(SOURCES), 4), dtype=torch.int32, device="cuda")
        self.loads[:, 0] = torch.arange(len(SOURCES))
        self.counts = {n: torch.tensor([n], dtype=torch.int32, device="cuda") for n in SIZES[size_bytes]}
        self.gather = Gather(self.host.view(-1), self.rows.view(-1), size_bytes, [size_bytes], where)

    def by_engine(self, count: int) -> None:
        """One copy each."""
        for source, target in zip(SOURCES[:count], TARGETS[:count], strict=True):
            self.rows[target].copy_(self.host[source], non_blocking=True)

    def by_loads(self, count: int) -> None:
        """The kernel that the engine uses."""
        self.gather(0, self.loads, self.counts[count], self.targets)

    def by_bulk(self, chunk: int, stages: int, blocks: int) -> Callable[[int], None]:
        """Bulk copies into shared memory and out of it."""
        text = f"#define CHUNK {chunk}\n#define STAGES {stages}\n{BULK}"
        kernel: Any = torch.cuda._compile_kernel(text, "bulk", compute_capability="90a")

        def read(count: int) -> None:
            kernel(
                grid=(blocks, 1, 1), block=(32, 1, 1), shared_mem=chunk * stages,
                args=(self.host, self.rows, self.sources, self.targets, count, self.size_bytes >> 10),
            )  # fmt: skip

        return read

    def gb_per_s(self, read: Callable[[int], None]) -> list[float]:
        """The median of five, for each number of experts."""
        return [count * self.size_bytes / 1e6 / _median_ms(read, count) for count in SIZES[self.size_bytes]]


def _median_ms(read: Callable[[int], None], count: int) -> float:
    cuda: Any = torch.cuda
    times = []
    for turn in range(7):
        began, over = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        began.record()
        read(count)
        over.record()
        torch.cuda.synchronize()
        if turn > 1:
            times.append(began.elapsed_time(over))
    return statistics.median(times)


def main() -> None:
    """All ways, all sizes."""
    rows = []
    for size in SIZES:
        reads = Reads(size)
        ways = {"copy engine": reads.by_engine, "loads": reads.by_loads}
        ways |= {f"bulk, {c} B x {s}, {b} blocks": reads.by_bulk(c, s, b) for c, s in CHUNKS for b in BLOCKS}
        for way, read in ways.items():
            row = {"expert_bytes": size, "way": way, "experts": SIZES[size], "gb_per_s": reads.gb_per_s(read)}
            print({key: value for key, value in row.items() if key != "experts"}, flush=True)
            rows.append(row)
    publish("gpu_host_reads", {"rows": rows, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__})


if __name__ == "__main__":
    main()
