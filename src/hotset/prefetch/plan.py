"""By which rules each driver prefetches experts: one plan, which the simulator follows as a whole.

The host reads only `rows` of it, the device `rows`, `parts`, `reach`, `rows_per_part` and `max_ranks`; both use
MIN_PROBABILITY. Their other rules are in their own code and stand here for the simulator: a change belongs in both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from hotset.checks import choice, instance, number, put, whole
from hotset.forecasts import MAX_DISTANCE
from hotset.shape import ModelShape

MIN_PROBABILITY = 0.3
"""Below this a prediction is wrong too often to be worth the link, even where it delays no other transfer."""
MAX_ROWS = 1 << 16
"""More rows than this are refused."""
LARGE_BYTES = 16 << 20
"""To copy such an expert takes longer than a layer computes: a second one for the same layer never starts."""

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
    wraps: bool = False  # the first layers of the next step come after the last of this one
    predicted_only: bool = False  # only experts that the target layer's router ranked, not every likely one
    split_rows: bool = False  # the layers ahead, and the one that computes, have rows of their own
    requeues: bool = False  # each event ranks anew: what has not started makes way, and the nearest layer goes first
    claim: Claim = Claim.REST
    cancels: bool = True  # a transfer that turns out to be useless is stopped
    adaptive: bool = False  # the experts sent for per layer grow while they come in time, and shrink while late
    trial: bool = True  # steps with prefetch are compared with control steps, and the loser is switched off
    layer_trial: bool = False  # layers are compared on their own, too, by their stalls
    adjusts_times: bool = False  # what a step owes to its number of misses is taken out before times are compared

    def __post_init__(self) -> None:
        put(self, driver=choice(self.driver, Driver, "the driver"), claim=choice(self.claim, Claim, "the claim"))
        put(self, rows=whole(self.rows, "the number of rows for prefetch", 0, MAX_ROWS))
        put(self, layers_ahead=whole(self.layers_ahead, "the layers that prefetch reaches ahead", 1, MAX_DISTANCE))
        put(self, max_ranks=whole(self.max_ranks, "the ranks that are considered", 1, MAX_ROWS))
        put(self, min_probability=number(self.min_probability, "the minimal probability of a prediction", 0, 1e9))

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
    on_gpu = driver is Driver.HOST
    return PrefetchPlan(
        driver=driver,
        rows=min(shape.top_k, _HOST_ROWS),
        # One layer: the host learns the routing late, and a second layer's predictions would take rows from the first.
        layers_ahead=1,
        max_ranks=min(2 * shape.top_k, shape.experts),
        wraps=True,  # the host's forecasts know the next step's first layer by what the last steps used
        # A copy that was launched cannot be stopped, and one mark in the stream stands for all copies before it: marks
        # cost the host time. Reads from disk are single files, which stop and are promoted one by one.
        claim=Claim.BATCH if on_gpu else Claim.REST,
        cancels=not on_gpu,
        adaptive=True,
        layer_trial=True,  # the host measures every event's stall anyway
    )


def _device(shape: ModelShape) -> PrefetchPlan:
    """The kernels of a captured step predict by the routers, since their inputs are at hand there."""
    return PrefetchPlan(
        driver=Driver.DEVICE,
        # One or two for the layer that computes and for each of the two ahead: nothing in use is overwritten.
        rows=3 if (shape.expert_bytes or 0) >= LARGE_BYTES else 6,
        split_rows=True,
        # Two: misses come in bursts, and one layer takes less time than a burst.
        layers_ahead=2,
        max_ranks=min(2 * shape.top_k, shape.experts),
        wraps=False,  # the next token is not known when the last layer runs, so no router can be asked
        predicted_only=True,
        requeues=True,  # copies stop at the next event by themselves, so that its own loads never wait for them
        cancels=True,
        # Neither budgets nor single layers: the rows are one or two, and stalls of single layers are not measured.
        adaptive=False,
        layer_trial=False,
        adjusts_times=True,  # whole steps are timed on the device, and misses make most of their differences
    )


def prefetch_rows(driver: Driver | str, shape: ModelShape) -> int:
    """The rows that a driver's plan takes beside the cache."""
    return plan_prefetch(driver, shape).rows
