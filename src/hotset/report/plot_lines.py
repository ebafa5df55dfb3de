"""The lines of one panel: hit rate against the share of experts that are resident, both in percent."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hotset.report.words import BOUND, LRU, expert_bytes

if TYPE_CHECKING:
    from hotset.shape import ModelShape
    from hotset.sim import LruCurve, Row

_MAX_POINTS = 256
_MAX_APART = 0.05  # points from curve to replay; more is another setting, such as prompts that fill slots

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Line:
    """One policy: its path, and the points of it that were replayed."""

    policy: str
    x: Floats
    y: Floats
    points: tuple[Floats, Floats]

    @property
    def exact(self) -> bool:
        """Whether the path is known between its replayed points, too."""
        return len(self.x) > len(self.points[0])


@dataclass(frozen=True, eq=False)
class Panel:
    """What is drawn of one trace."""

    rows: list[Row]
    lines: list[Line]  # the best first, the bound before all
    cycle: float  # percent of the experts that one token uses
    gib: float | None  # of all experts

    @property
    def trace(self) -> str:
        """The name of the trace."""
        return self.rows[0].trace

    @property
    def best(self) -> str | None:
        """The best policy that does not know the future."""
        return next((line.policy for line in self.lines if line.policy != BOUND), None)

    @property
    def reach(self) -> float:
        """The largest budget, in percent."""
        return max(100 * row.budget_fraction for row in self.rows)


def panel_of(rows: list[Row], curve: LruCurve | None, shape: ModelShape | None) -> Panel:
    """Order the rows of one trace into lines; the shape knows sizes that rows without misses do not."""
    ordered = sorted(rows, key=lambda row: row.budget_slots)
    own: dict[str, list[Row]] = {}
    for row in ordered:
        own.setdefault(row.policy, []).append(row)
    policies = sorted(own, key=lambda name: (name == BOUND, fmean(row.hit_rate for row in own[name])), reverse=True)
    lines = [_line(name, own[name], curve) for name in policies]
    last = ordered[-1]
    size = shape.expert_bytes if shape else expert_bytes(rows)
    return Panel(
        rows=ordered,
        lines=lines,
        cycle=100 * last.budget_fraction / last.budget_cycles,
        gib=size * last.budget_slots / last.budget_fraction / 2**30 if size else None,
    )


def _line(policy: str, rows: list[Row], curve: LruCurve | None) -> Line:
    x = np.array([100 * row.budget_fraction for row in rows])
    y = np.array([100 * row.hit_rate for row in rows])
    if policy != LRU or curve is None:
        return Line(policy, x, y, (x, y))
    curve_x, curve_y = _exact(curve, [row.budget_slots for row in rows])
    below = x < curve_x.min(initial=np.inf)  # sizes that the curve cannot tell were replayed
    path_x, path_y = np.append(x[below], curve_x), np.append(y[below], curve_y)
    if np.abs(np.interp(x, path_x, path_y) - y).max() > _MAX_APART:
        return Line(policy, x, y, (x, y))
    return Line(policy, path_x, path_y, (x, y))


def _exact(curve: LruCurve, budgets: list[int]) -> tuple[Floats, Floats]:
    """The curve from its smallest size to the largest budget, through every budget between."""
    least, most = curve.smallest * len(curve.found), max(budgets)
    steps = np.linspace(least, most, _MAX_POINTS).astype(np.int64) if most > least else np.array([], np.int64)
    slots = np.union1d(steps, [size for size in budgets if size >= least]).astype(np.int64)
    return 100 * slots / curve.shape.total_experts, 100 * curve.hit_rates(slots)
