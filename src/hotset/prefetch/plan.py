"""By which rules each driver prefetches experts: one plan, which simulator, host and device read.

Fields are what a plan decides: the driver that it is for follows all of them, live and simulated, and a plan with a
field that its driver cannot follow is refused. Properties are what follows from the fields, or from what a driver is:
how its transfers end is a matter of its code, which the simulator models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from hotset.checks import choice, instance, number, put, whole
from hotset.errors import HotsetError
from hotset.forecasts import MAX_DISTANCE
from hotset.shape import ModelShape

MIN_PROBABILITY = 0.3
"""Below this a prediction is wrong too often to be worth the link, even where it delays no other transfer."""
MAX_ROWS = 1 << 16
"""More rows than this are refused."""
LARGE_BYTES = 16 << 20
"""To copy such an expert takes longer than a layer computes: a second one for the same layer never starts."""

# No plan of the device has these: it knows no next token, changes no budget and times no single layer.
_HOST_RULES = ("wraps", "adaptive", "layer_trial")
_HOST_ROWS = 4  # the cache gives them up, and more of them cost more hits than they bring (docs/results/studies.md)


class Driver(StrEnum):
    """What serves the MoE layers of a decode step, and so prefetches for them."""

    CPU = "cpu"  # the host, which computes on the CPU and reads from disk
    HOST = "host"  # the host, which drives a GPU and copies from the RAM tier
    DEVICE = "device"  # the GPU itself, by kernels of a captured step


class Claim(StrEnum):
    """What an event waits for that asks for an expert whose transfer has started but not ended."""

    REST = "rest"  # for the rest of its bytes
    BATCH = "batch"  # for all that was sent with it and before it


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchPlan:
    """The rules of prefetch. Prefetched experts have rows of their own, so a wrong prediction evicts no expert."""

    driver: Driver
    rows: int  # of memory, beside the cache
    layers_ahead: int  # predictions are made for so many layers after the one that was routed
    max_ranks: int  # experts of a layer that are considered, the likeliest first
    min_probability: float = MIN_PROBABILITY
    trial: bool = True  # steps with prefetch are compared with control steps, and the loser is switched off
    wraps: bool = False  # the first layers of the next step come after the last of this one
    adaptive: bool = False  # the experts sent for per layer grow while they come in time, and shrink while late
    layer_trial: bool = False  # layers are compared on their own, too, by their stalls

    def __post_init__(self) -> None:
        put(self, driver=choice(self.driver, Driver, "the driver"))
        if wrong := [name for name in _HOST_RULES if self.by_device and getattr(self, name)]:
            raise HotsetError(f"{wrong[0]} is a rule of hosts: leave it out of a plan for the device")
        put(self, rows=whole(self.rows, "the number of rows for prefetch", 0, MAX_ROWS))
        put(self, layers_ahead=whole(self.layers_ahead, "the layers that prefetch reaches ahead", 1, MAX_DISTANCE))
        put(self, max_ranks=whole(self.max_ranks, "the ranks that are considered", 1, MAX_ROWS))
        put(self, min_probability=number(self.min_probability, "the minimal probability of a prediction", 0, 1e9))

    @property
    def by_device(self) -> bool:
        """Whether kernels of a captured step prefetch, not a host."""
        return self.driver is Driver.DEVICE

    @property
    def predicted_only(self) -> bool:
        """Whether only experts are prefetched that the target layer's router ranked, not every likely one."""
        return self.by_device  # the routers' inputs are at hand there, and all else is with the host

    @property
    def split_rows(self) -> bool:
        """Whether the layers ahead, and the one that computes, have rows of their own."""
        return self.by_device  # its streams run side by side: nothing in use may be overwritten

    @property
    def requeues(self) -> bool:
        """Whether each event ranks anew: what has not started makes way, and the nearest layer goes first."""
        return self.by_device  # copies stop at the next event by themselves, so that its own loads never wait

    @property
    def adjusts_times(self) -> bool:
        """Whether what a step owes to its number of misses is taken out before times are compared."""
        return self.by_device  # whole steps are timed there, and misses make most of their differences

    @property
    def claim(self) -> Claim:
        """What an event waits for that asks for an expert which is still on its way."""
        # One mark in the stream stands for all copies before it: marks cost the host time. Reads are promoted singly.
        return Claim.BATCH if self.driver is Driver.HOST else Claim.REST

    @property
    def cancels(self) -> bool:
        """Whether a transfer that turns out to be useless is stopped."""
        return self.driver is not Driver.HOST  # a copy that was launched cannot be

    @property
    def parts(self) -> int:
        """Into how many parts the rows fall, each for the layers of one remainder; too few rows shorten the reach."""
        return min(self.layers_ahead + 1, max(self.rows, 1)) if self.split_rows else 1

    @property
    def rows_per_part(self) -> int:
        """The most experts of one layer that can be prefetched at a time."""
        return self.rows // self.parts

    @property
    def reach(self) -> int:
        """The layers ahead that there are rows for."""
        return self.parts - 1 if self.split_rows else self.layers_ahead


def plan_prefetch(
    driver: Driver | str, shape: ModelShape, *, rows: int | None = None, trial: bool = True
) -> PrefetchPlan:
    """The plan for a driver; `rows` where a budget or a person gives others than it would take."""
    driver = choice(driver, Driver, "the driver")
    instance(shape, ModelShape, "the shape of a model")
    plan = _device(shape) if driver is Driver.DEVICE else _host(driver, shape)
    return replace(plan, rows=plan.rows if rows is None else rows, trial=trial)


def _host(driver: Driver, shape: ModelShape) -> PrefetchPlan:
    """The host predicts by any forecast, between two launches or while the CPU would wait for the disk."""
    return PrefetchPlan(
        driver=driver,
        rows=min(shape.top_k, _HOST_ROWS),
        # One layer: the host learns the routing late, and a second layer's predictions would take rows from the first.
        layers_ahead=1,
        max_ranks=min(2 * shape.top_k, shape.experts),
        wraps=True,  # the host's forecasts know the next step's first layer by what the last steps used
        adaptive=True,
        layer_trial=True,  # the host measures every event's stall anyway
    )


def _device(shape: ModelShape) -> PrefetchPlan:
    """The kernels of a captured step predict by the routers, since their inputs are at hand there."""
    return PrefetchPlan(
        driver=Driver.DEVICE,
        # One or two for the layer that computes and for each of the two ahead: nothing in use is overwritten.
        rows=3 if (shape.expert_bytes or 0) >= LARGE_BYTES else 6,
        # Two: misses come in bursts, and one layer takes less time than a burst.
        layers_ahead=2,
        max_ranks=min(2 * shape.top_k, shape.experts),
    )


def prefetch_rows(driver: Driver | str, shape: ModelShape) -> int:
    """The rows that a driver's plan takes beside the cache."""
    return plan_prefetch(driver, shape).rows
