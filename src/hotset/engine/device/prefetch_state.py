"""What prefetch on the device remembers: queues of experts, how far they came, and what ranks have been worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hotset.engine.device.gather import PREFETCH
from hotset.prefetch import PrefetchPlan

Tensor = torch.Tensor


class PrefetchState(NamedTuple):
    """Passes of all sizes share it. The first index of many is the target layer's part: its number modulo all parts."""

    prefetch_row: Tensor  # int32 [parts, per_part], the rows of the arena that are for prefetch
    queued_expert: Tensor  # int32 [parts, per_part], the experts picked, in the order of sending, then -1
    queued_row: Tensor  # int32 [parts, per_part], where they go
    length: Tensor  # int32 [parts], how many were picked
    target: Tensor  # int64 [parts], the number of the event that they were picked for
    progress: Tensor  # int32 [parts, programs], of all blocks of a list the first that each program has not copied
    ranked: Tensor  # int32 [parts, distances, width], the experts by the target's router, best first, or -1
    ranked_for: Tensor  # int64 [parts, distances], the number of the event that this was for
    votes: Tensor  # float32 [experts], of several tokens
    own: Tensor  # float32 [distances, 2, layers, width, 2], hits and trials of each rank, of one token and of several
    shared: Tensor  # float32 [distances, 2, width, 2], the same over all layers
    max_queued: Tensor  # int32 [layers], how many may be queued for a layer; no kernel changes it
    stop: Tensor  # int64 [1], the number of the last event whose planning has begun: what was sent before it ends
    epoch: Tensor  # int64 [1], the number of the next event
    slot_of_target: Tensor  # int32 [distances, experts], the slots of the layers ahead, or -1
    tallies: Tensor  # int64 [6], prefetched in time, late and wasted, and the bytes of each copied by then

    @classmethod
    def of(
        cls,
        rows: Sequence[int],
        layers: int,
        experts: int,
        plan: PrefetchPlan,
        device: torch.device | str,
        programs: int = PREFETCH.programs,
    ) -> PrefetchState:
        """Nothing queued or learnt yet, and these rows of the arena for prefetch; what cannot be shared is left out."""
        parts, distances, per_part, width = plan.parts, plan.reach, plan.rows_per_part, plan.max_ranks
        if parts < 2:
            raise ValueError("prefetch needs two rows of the arena at least")

        def filled(kind: torch.dtype, *shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=kind, device=device)

        i32, i64, f32 = torch.int32, torch.int64, torch.float32
        return cls(
            prefetch_row=torch.tensor(list(rows[: parts * per_part]), dtype=i32, device=device).view(parts, per_part),
            queued_expert=filled(i32, parts, per_part, value=-1),
            queued_row=filled(i32, parts, per_part, value=-1),
            length=filled(i32, parts),
            target=filled(i64, parts, value=-1),
            progress=filled(i32, parts, programs),
            ranked=filled(i32, parts, distances, width, value=-1),
            ranked_for=filled(i64, parts, distances, value=-1),
            votes=filled(f32, experts),
            own=filled(f32, distances, 2, layers, width, 2),
            shared=filled(f32, distances, 2, width, 2),
            max_queued=filled(i32, layers, value=per_part),
            stop=filled(i64, 1),
            epoch=filled(i64, 1),
            slot_of_target=filled(i32, distances, experts),
            tallies=filled(i64, 6),
        )

    @property
    def distances(self) -> int:
        """How many layers prefetch reaches ahead."""
        return self.ranked.shape[1]

    def drop(self) -> None:
        """Forget what is queued, but not what was learnt; rows stay where they are, and events go on being numbered."""
        for tensor in (self.target, self.ranked_for):
            tensor.fill_(-1)
