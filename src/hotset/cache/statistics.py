"""The statistics of a live cache as grids, for tables, plots and profiles."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hotset.cache.controller import Controller
from hotset.cache.counters import Count
from hotset.cache.table import FOREVER
from hotset.cache.usage import HITS, MISSES, USES, ages, rates, window_counts
from hotset.profile.profile import PINNED, RESIDENT
from hotset.profile.statistics import Counts, History, Statistics


def statistics_of(controller: Controller, warmed: Counts, load_bytes: Counts, history: History) -> Statistics:
    """All that is known of every expert now; `warmed` are loads in the background, `load_bytes` what one moves."""
    usage = controller.usage
    loads = usage.counts[MISSES].sum(axis=0) + warmed
    return Statistics(
        shape=controller.plan.shape,
        uses=usage.counts[USES].astype(float),
        hits=usage.counts[HITS].copy(),
        misses=usage.counts[MISSES].copy(),
        tokens=phase_tokens(controller),
        loads=loads,
        loaded_bytes=loads * load_bytes,
        rate=rates(usage),
        window=window_counts(usage),
        age=ages(usage),
        resident=controller.table.slot_of >= 0,
        pinned=controller.table.last == FOREVER,
        history=history,
    )


def phase_tokens(controller: Controller) -> Counts:
    """The tokens of each phase; layers that some tokens pass by have seen fewer."""
    tokens: Counts = controller.table.counters[:, Count.TOKENS].max(axis=1).astype(np.int64)
    return tokens


def residency_of(controller: Controller) -> npt.NDArray[np.uint8]:
    """Which experts are resident and which are pinned, as a profile keeps it."""
    resident, pinned = controller.table.slot_of >= 0, controller.table.last == FOREVER
    residency: npt.NDArray[np.uint8] = (resident * RESIDENT + pinned * PINNED).astype(np.uint8)
    return residency
