"""How memory is split: what everything but experts takes, slots on the tier that computes, slots in RAM, the disk."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hotset.analysis.planner.model import PlannedModel, Precision
from hotset.analysis.planner.rates import Engine
from hotset.prefetch import Driver, prefetch_rows
from hotset.shape import ModelShape

SAFETY = 0.05
"""The share that `--memory auto` leaves to others, as `models/budget.py` has it."""
HOST_SHARE, HOST_STAGING = 0.8, 8
"""Of free RAM: what the tier behind a GPU takes, and its staging, as `models/memory_plan.py` has them."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a machine has: RAM, and a GPU's memory if it has one."""

    ram_bytes: int
    gpu_bytes: int | None = None

    @property
    def fast_bytes(self) -> int:
        """The memory that computes."""
        return self.ram_bytes if self.gpu_bytes is None else self.gpu_bytes

    def with_fast(self, size_bytes: int) -> Memory:
        """The same with so much of the memory that computes."""
        return Memory(size_bytes, None) if self.gpu_bytes is None else Memory(self.ram_bytes, size_bytes)


@dataclass(frozen=True, slots=True)
class Split:
    """Where the bytes of a model lie."""

    slots: int  # on the tier that computes
    beside: int  # rows for staging and prefetch there
    ram_slots: int  # of the tier behind a GPU
    expert_bytes: int
    rest_bytes: int  # everything but experts
    given_bytes: int  # of the tier that computes
    engine: Engine
    total: int

    @property
    def fast_bytes(self) -> int:
        """What experts take of the memory that computes, staging included."""
        return (self.slots + self.beside) * self.expert_bytes

    @property
    def unused_bytes(self) -> int:
        """What is left of it."""
        return self.given_bytes - self.rest_bytes - self.fast_bytes

    @property
    def ram_bytes(self) -> int:
        """What experts take of RAM behind a GPU."""
        return self.ram_slots * self.expert_bytes

    @property
    def disk_bytes(self) -> int:
        """The experts that lie on disk alone."""
        held = max(self.slots, self.ram_slots)
        return max(self.total - held, 0) * self.expert_bytes

    @property
    def resident(self) -> float:
        """The share of the experts that has a slot where it is computed."""
        return self.slots / self.total

    @property
    def is_short_of_ram(self) -> bool:
        """Whether there is RAM behind a GPU, and it does not hold all experts."""
        return self.engine is Engine.HOST and self.ram_slots < self.total


def split(model: PlannedModel, precision: Precision, memory: Memory) -> Split | None:
    """The best split for a precision: as many experts as fit on each tier; None where one event does not fit."""
    shape, size = model.shape, precision.expert_bytes
    ram_slots, engine = 0, Engine.CPU
    if memory.gpu_bytes is not None:
        ram_slots = min(int(memory.ram_bytes * HOST_SHARE) // size - HOST_STAGING, shape.total_experts)
        engine = Engine.DEVICE if ram_slots >= shape.total_experts else Engine.HOST
    found = slots_for(expert_room(model, memory.fast_bytes), shape, size, engine)
    if found is None:
        return None
    slots, beside = found
    if slots >= shape.total_experts:
        engine, ram_slots = Engine.CPU if memory.gpu_bytes is None else Engine.DEVICE, 0
    elif memory.gpu_bytes is not None and ram_slots < shape.layers:
        return None
    return Split(
        slots, beside, max(ram_slots, 0), size, model.rest_bytes, memory.fast_bytes, engine, shape.total_experts
    )


def expert_room(model: PlannedModel, fast_bytes: int) -> int:
    """What `auto` would give to experts."""
    return max(int((fast_bytes - model.rest_bytes) * (1 - SAFETY)), 0)


def slots_for(room_bytes: int, shape: ModelShape, expert_bytes: int, engine: Engine) -> tuple[int, int] | None:
    """The slots that bytes buy, and the rows beside them, as `hotset.load` divides them; None: too few to work."""
    least, most = least_slots(shape), shape.total_experts
    staging = staging_rows(shape, engine)
    staging = max(1, min(staging, room_bytes // expert_bytes - least))
    slots = min(max(room_bytes // expert_bytes - staging, 0), most)
    rows = max(min(_prefetch_rows(shape, expert_bytes, engine), slots // 16, slots - least), 0) if slots < most else 0
    slots = min(max(room_bytes // expert_bytes - staging - rows, 0), most)
    return (slots, staging + rows) if slots >= least else None


def least_slots(shape: ModelShape) -> int:
    """The fewest slots with which every layer can cache."""
    return max(shape.layers, shape.top_k)


def least_bytes(model: PlannedModel, precision: Precision) -> int:
    """The least memory, of the tier that computes, with which a model runs at all."""
    room = (least_slots(model.shape) + 1) * precision.expert_bytes
    return model.rest_bytes + math.ceil(room / (1 - SAFETY)) + 1


def least_ram_bytes(model: PlannedModel, precision: Precision) -> int:
    """The least RAM behind a GPU with which a model runs whose experts are not all on the GPU."""
    return math.ceil((model.layers + HOST_STAGING) * precision.expert_bytes / HOST_SHARE)


def bytes_for(model: PlannedModel, precision: Precision, slots: int, engine: Engine) -> int:
    """The least memory of the tier that computes that comes to so many slots."""
    shape, size = model.shape, precision.expert_bytes
    rows = slots + 1
    while True:
        found = slots_for(rows * size, shape, size, engine)
        if found is not None and found[0] >= slots:
            break
        rows += 1
    fast = model.rest_bytes + math.ceil(rows * size / (1 - SAFETY))
    while expert_room(model, fast) < rows * size:  # rounding
        fast += 1
    return fast


def staging_rows(shape: ModelShape, engine: Engine) -> int:
    """The rows through which experts pass that get no slot."""
    most = {Engine.CPU: min(shape.top_k, 4), Engine.HOST: min(shape.top_k, 8), Engine.DEVICE: shape.top_k}
    return max(2, most[engine])


def _prefetch_rows(shape: ModelShape, expert_bytes: int, engine: Engine) -> int:
    sized = ModelShape(shape.layers, shape.experts, shape.top_k, expert_bytes)
    return prefetch_rows(Driver.DEVICE if engine is Engine.DEVICE else Driver.HOST, sized)
