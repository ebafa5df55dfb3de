"""Which experts single requests used: token counts, as a profile keeps them, and in and out of a policy's collection.

A matrix holds the tokens of one request that used each expert, prefill and decode apart: [phases, layers, experts].
The idea, and the rule of what makes way, are those of MoE-Infinity (arXiv 2401.14361).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hotset.errors import ProfileError
from hotset.shape import ModelShape
from hotset.trace import Phase

if TYPE_CHECKING:
    from hotset.policies.eam import EamState

CAPACITY = 200
MAX_MATRICES = 4096
MAX_FULL_BYTES = 256 << 20
"""What all matrices take in full: a small file must not become a large collection."""
MAX_TOKENS = float(1 << 40)


def full_bytes(shape: ModelShape) -> int:
    """What one matrix takes in full."""
    return len(Phase) * shape.total_experts * 4


@dataclass(frozen=True, eq=False)
class Matrices:
    """Matrices as they are kept: row after row, only the experts that were used."""

    sizes: npt.NDArray[np.uint16]  # [matrices, phases, layers], the experts of each row
    expert: npt.NDArray[np.uint16]  # [entries], rising within a row
    count: npt.NDArray[np.float32]  # [entries], tokens

    def __len__(self) -> int:
        return len(self.sizes)

    def each(self, experts: int) -> Iterator[npt.NDArray[np.float32]]:
        """One matrix after the other, in full, for layers of so many experts."""
        end = 0
        for sizes in self.sizes:
            begin, end = end, end + int(sizes.sum(dtype=np.int64))
            rows = np.repeat(np.arange(sizes.size), sizes.reshape(-1))
            matrix = np.zeros((sizes.size, experts), np.float32)
            matrix[rows, self.expert[begin:end]] = self.count[begin:end]
            yield matrix.reshape(*sizes.shape, experts)

    @classmethod
    def of(cls, full: npt.NDArray[Any]) -> Matrices:
        """Keep what is not zero of [matrices, phases, layers, experts]."""
        counts = full.astype(np.float32, copy=False)
        used = counts > 0
        *_, expert = np.nonzero(used)
        return cls(used.sum(axis=-1, dtype=np.uint16), expert.astype(np.uint16), counts[used])

    def check(self, shape: ModelShape) -> None:
        """Raise ProfileError unless these are matrices of a model of this shape, in their one order."""
        if self.sizes.shape[1:] != (len(Phase), shape.layers):
            raise ProfileError(f"the matrices are not of {shape.layers} layers")
        if len(self) > MAX_MATRICES or len(self) * full_bytes(shape) > MAX_FULL_BYTES:
            raise ProfileError(f"there are {len(self):,} matrices, more than any collection holds")
        entries = int(self.sizes.sum(dtype=np.int64))
        if self.expert.shape != (entries,) or self.count.shape != (entries,):
            raise ProfileError("the matrices do not have as many entries as they state")
        if (self.expert >= shape.experts).any() or not self._rises():
            raise ProfileError(f"the experts of a matrix must rise, and be less than {shape.experts}")
        if not ((self.count > 0) & (self.count <= MAX_TOKENS)).all():
            raise ProfileError("a count of the matrices is not positive, far too large or no number")

    def _rises(self) -> bool:
        """Whether experts rise within each row."""
        rises = self.expert[1:] > self.expert[:-1]
        begins = np.cumsum(self.sizes.reshape(-1), dtype=np.int64)  # where the next row begins, if it has experts
        rises[begins[(begins > 0) & (begins < len(self.expert))] - 1] = True
        return bool(rises.all())


def collected(state: EamState) -> Matrices:
    """What a policy or forecast has stored, the running requests included; its state is left alone."""
    from hotset.policies.eam import end_requests

    copy = type(state)(*(array.copy() for array in state))
    end_requests(copy, True)
    return Matrices.of(copy.rows[: int(copy.held[0])])


def recall(state: EamState, matrices: Matrices) -> None:
    """Let a policy or forecast begin with stored requests; the first make way if they are too many."""
    for matrix in matrices.each(state.rows.shape[-1]):
        store(state, matrix)


def store(state: EamState, matrix: npt.NDArray[Any]) -> None:
    """Store a request of these counts; when all places are taken, in that of the request most like it."""
    from hotset.policies.eam import add_row, end_requests

    for phase, layer in np.argwhere(matrix.any(axis=-1)).tolist():
        experts = np.flatnonzero(matrix[phase, layer])
        add_row(state, phase, layer, experts, matrix[phase, layer, experts].astype(np.float64))
    end_requests(state, True)


def union(shape: ModelShape, parts: Sequence[Matrices | None], capacity: int = CAPACITY) -> Matrices | None:
    """All different matrices, in the order given; where they are too many, the later ones replace those most alike."""
    from hotset.policies.eam import empty_state

    known = [part for part in parts if part is not None]
    if not known:
        return None
    state = empty_state(shape, capacity, 1, 0.0)
    for matrix in {matrix.tobytes(): matrix for part in known for matrix in part.each(shape.experts)}.values():
        store(state, matrix)
    return Matrices.of(state.rows[: int(state.held[0])])
