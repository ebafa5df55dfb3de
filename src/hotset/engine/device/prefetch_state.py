"""What prefetch on the device remembers: lists of guesses, how far they came, and what ranks have been worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hotset.engine.device import gather

Tensor = torch.Tensor

DISTANCES = 2
"""So many layers are looked ahead: what is missing comes in bursts, and one layer takes less time than a burst."""


class Work(NamedTuple):
    """How a copy is shared: among so many programs, in blocks of so many words of eight bytes."""

    programs: int
    block: int
    warps: int


DEMAND = Work(gather.PROGRAMS, gather.BLOCK_WORDS, gather.WARPS)
GUESS = Work(64, 1024, 4)
"""Few and small: an event that begins waits until these 512 KiB have arrived, some 10 us."""


class AheadState(NamedTuple):
    """Passes of all sizes share it. The first index of many is the target layer's part: its number modulo all parts."""

    ahead_row: Tensor  # int32 [parts, guesses], the rows of the arena that are for guesses
    guess_expert: Tensor  # int32 [parts, guesses], who was picked, in the order of sending, then -1
    guess_row: Tensor  # int32 [parts, guesses], where they go
    length: Tensor  # int32 [parts], how many were picked
    target: Tensor  # int64 [parts], the number of the event that they were picked for
    progress: Tensor  # int32 [parts, programs], of all blocks of a list the first that each program has not copied
    named: Tensor  # int32 [parts, distances, width], whom the target's router named beforehand, best first, or -1
    named_for: Tensor  # int64 [parts, distances], the number of the event that they were named for
    votes: Tensor  # float32 [experts], of several tokens
    own: Tensor  # float32 [distances, 2, layers, width, 2], hits and trials of each rank, of one token and of several
    shared: Tensor  # float32 [distances, 2, width, 2], the same over all layers
    most: Tensor  # int32 [layers], how many guesses may be sent for a layer
    stop: Tensor  # int64 [1], the number of the last event whose planning has begun: what was sent before it ends
    epoch: Tensor  # int64 [1], the number of the next event
    seat: Tensor  # int32 [distances, experts], the slots of the layers that guesses are made for now, or -1
    tallies: Tensor  # int64 [6], guesses in time, late and wasted, and the bytes of each that a guess has copied

    @classmethod
    def of(
        cls,
        rows: Sequence[int],
        layers: int,
        experts: int,
        top_k: int,
        device: torch.device | str,
        programs: int = GUESS.programs,
        distances: int = DISTANCES,
    ) -> AheadState:
        """Nothing guessed or learnt yet, and these rows of the arena for guesses; what cannot be shared is left out."""
        parts = min(distances + 1, len(rows))
        if parts < 2:
            raise ValueError("guesses need two rows of the arena at least")
        distances, guesses, width = parts - 1, len(rows) // parts, min(2 * top_k, experts)

        def filled(kind: torch.dtype, *shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=kind, device=device)

        i32, i64, f32 = torch.int32, torch.int64, torch.float32
        return cls(
            ahead_row=torch.tensor(list(rows[: parts * guesses]), dtype=i32, device=device).view(parts, guesses),
            guess_expert=filled(i32, parts, guesses, value=-1),
            guess_row=filled(i32, parts, guesses, value=-1),
            length=filled(i32, parts),
            target=filled(i64, parts, value=-1),
            progress=filled(i32, parts, programs),
            named=filled(i32, parts, distances, width, value=-1),
            named_for=filled(i64, parts, distances, value=-1),
            votes=filled(f32, experts),
            own=filled(f32, distances, 2, layers, width, 2),
            shared=filled(f32, distances, 2, width, 2),
            most=filled(i32, layers, value=guesses),
            stop=filled(i64, 1),
            epoch=filled(i64, 1),
            seat=filled(i32, distances, experts),
            tallies=filled(i64, 6),
        )

    @property
    def distances(self) -> int:
        """How many layers are looked ahead."""
        return self.named.shape[1]

    def drop(self) -> None:
        """Forget guesses, but not what was learnt; rows stay where they are, and events go on being numbered."""
        for tensor in (self.target, self.named_for):
            tensor.fill_(-1)

    def reset(self) -> None:
        """Forget guesses, counts and what was learnt."""
        self.drop()
        for tensor in (self.own, self.shared, self.tallies):
            tensor.zero_()


class Tallies(NamedTuple):
    """What came of the guesses, in experts and in the bytes that were copied on a guess."""

    in_time: int
    late: int
    wasted: int
    in_time_bytes: int
    late_bytes: int
    wasted_bytes: int
