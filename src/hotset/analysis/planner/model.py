"""What the planner knows of a model: its experts' matrices, and what everything else takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from hotset.errors import FormatError, HotsetError
from hotset.formats import parse
from hotset.shape import ModelShape
from hotset.store.layout import PAGE_BYTES, PART_ALIGNMENT_BYTES, round_up

BFLOAT16 = "bfloat16"
UNNAMED = "MODEL"
"""What commands call a model that is known by its numbers alone."""
SPECS = {BFLOAT16: "dense", "int8": "integer:bits=8", "int4": "integer:short=on", "mxfp4": "mxfp4"}
"""The precisions that experts of plain numbers can have, and their weight formats."""
MORE_SPECS = {"float16": "dense:dtype=float16", "float32": "dense:dtype=float32", "fp8": "fp8"}
"""Precisions that a checkpoint may have, and that hotset does not make."""
PLAIN = (BFLOAT16, "float16", "float32")


class Precision(NamedTuple):
    """One way to hold the experts of a model, and how to come by it."""

    name: str
    expert_bytes: int  # of a slot
    pack: str | None = None  # what `hotset pack --experts` makes it by
    expand: bool = False  # whether `--experts dense` makes it of smaller numbers when they are read

    @property
    def lossy(self) -> bool:
        """Whether it is made by rounding the checkpoint's own numbers."""
        return self.pack is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """The sizes of a model that decide over memory and time; layers are MoE layers, unless they are all."""

    name: str
    layers: int
    experts: int
    top_k: int
    matrices: tuple[tuple[int, int], ...]  # of one expert: outputs and inputs
    all_layers: int
    dense_bytes: int  # weights that are always in memory
    read_bytes: int  # of these, what each token reads: all but embeddings
    context_bytes: int  # the key-value cache of the context that room is left for
    work_bytes: int  # activations of a step, and what libraries take
    own: str = BFLOAT16  # the precision of the checkpoint
    own_bytes: int | None = None  # the bytes of a slot in that precision, where they are known
    there: bool = False  # whether its weights are on this machine
    packed: bool = False  # whether they are a pack, which is used as it is

    @property
    def shape(self) -> ModelShape:
        """The shape that traces are of."""
        return ModelShape(self.layers, self.experts, self.top_k)

    @property
    def rest_bytes(self) -> int:
        """What everything but the experts takes of the memory that computes."""
        return self.dense_bytes + self.context_bytes + self.work_bytes

    @property
    def expert_weights(self) -> int:
        """The numbers of one expert."""
        return sum(outputs * inputs for outputs, inputs in self.matrices)

    def precisions(self) -> list[Precision]:
        """The checkpoint's own precision first, then what it can be packed or expanded to."""
        own = Precision(self.own, self.own_bytes or self._slot_bytes(self.own))
        if self.packed:
            return [own]
        if self.own not in PLAIN:
            return [own, Precision(BFLOAT16, self._slot_bytes(BFLOAT16), expand=True)]
        found = [own]
        for name in SPECS:
            if name in (self.own, BFLOAT16):
                continue
            try:
                found.append(Precision(name, self._slot_bytes(name), pack=name))
            except FormatError:  # these matrices are not of whole groups
                continue
        return found

    def precision(self, name: str) -> Precision:
        """One of them by its name."""
        known = {each.name: each for each in self.precisions()}
        if name not in known:
            raise HotsetError(f'{self.name} has no precision "{name}": there are {", ".join(known)}')
        return known[name]

    @property
    def title(self) -> str:
        """What to call it in a line; one that is only numbers has no name."""
        return "a model of this --shape" if self.name == UNNAMED else self.name

    def renamed(self, name: str) -> PlannedModel:
        """The same under another name."""
        return replace(self, name=name)

    def _slot_bytes(self, precision: str) -> int:
        return slot_bytes(self.matrices, precision)


def slot_bytes(matrices: tuple[tuple[int, int], ...], precision: str) -> int:
    """The bytes of a slot for an expert of these matrices: each part aligned, the whole on pages."""
    known = SPECS | MORE_SPECS
    if precision not in known:
        raise HotsetError(f'the size of experts in "{precision}" is not known: name a model whose weights are here')
    chosen, end = parse(known[precision]), 0
    for outputs, inputs in matrices:
        for part in chosen.parts(outputs, inputs):
            end = round_up(end, PART_ALIGNMENT_BYTES) + part.size_bytes
    return round_up(end, PAGE_BYTES)
