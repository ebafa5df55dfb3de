"""The maps of layers by experts: how often each is used, and which are in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hotset.report.heat_words import UNDER, phase_of, shares, size_of, write_note
from hotset.report.plot_style import GREY, INK
from hotset.report.words import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hotset.profile.statistics import Grid, Statistics

_UNUSED = "#e4e4e4"
_TOP_SHARE = 99.0  # percentile: a handful of experts must not darken all others
_MIN_CELL = 3.0  # points: a mark in a smaller cell would not be seen
_LARGEST_MARK = 6.0

# A name, the colour of a cell and the colour of its mark, by resident + 2 * pinned; they differ in lightness, too.
_RESIDENCY: tuple[tuple[str, str, str | None], ...] = (
    ("not in memory", "#efefef", None),
    ("in memory", "#74add1", None),
    ("pinned, not in memory", "#fdd49e", INK),
    ("pinned", "#08306b", "#ffffff"),
)


def draw_use(axes: Axes, statistics: Statistics) -> bool:
    """Draw how often a token uses each expert; whether there was anything to draw."""
    phase = phase_of(statistics).name.lower()
    axes.set_title(f"Use of each expert ({phase})")
    uses = 100 * statistics.shape.top_k * shares(statistics)
    known = uses[np.isfinite(uses)]
    if not known.size:
        write_note(axes, "no expert was used yet")
        return False
    _number_experts(axes, statistics.shape.experts)
    axes.set_facecolor(_UNUSED)
    _colour(axes, uses, known, phase)
    return True


def draw_memory(axes: Axes, statistics: Statistics) -> bool:
    """Draw which are in memory and pinned there."""
    from matplotlib.colors import to_rgb

    levels = _levels(statistics)
    palette = np.array([to_rgb(color) for _, color, _ in _RESIDENCY])
    axes.imshow(palette[levels], aspect="auto")
    axes.set_title(_memory_title(statistics))
    _number_experts(axes, statistics.shape.experts)
    _add_legend(axes, levels)
    return True


def mark_pins(axes: Axes, statistics: Statistics) -> None:
    """Put a mark on every pinned expert, where cells are large enough to show one."""
    width, height = size_of(axes)
    size = min(width / statistics.shape.experts, height / statistics.shape.layers)
    if size < _MIN_CELL:
        return
    levels = _levels(statistics)
    for level, (_, _, color) in enumerate(_RESIDENCY):
        rows, columns = np.nonzero(levels == level)
        if color and rows.size:
            axes.plot(columns, rows, **_mark(color, min(0.6 * size, _LARGEST_MARK)))


def number_layers(axes: Axes, layers: int, *, named: bool) -> None:
    """Count the layers from the top; only the first panel of a row says so."""
    from matplotlib.ticker import MaxNLocator

    axes.set_ylim(layers - 0.5, -0.5)
    axes.yaxis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
    axes.tick_params(axis="y", labelleft=named)
    if named:
        axes.set_ylabel("MoE layer")


def _number_experts(axes: Axes, experts: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(-0.5, experts - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.set_xlabel("expert")


def _colour(axes: Axes, uses: Grid, known: Grid, phase: str) -> None:
    top = float(np.percentile(known, _TOP_SHARE))
    above = bool(known.max() > top)
    image = axes.imshow(np.ma.masked_invalid(uses), aspect="auto", cmap="cividis", vmin=0, vmax=top)
    place = axes.inset_axes((0, UNDER - 0.05, 1, 0.03))
    bar = axes.figure.colorbar(image, cax=place, orientation="horizontal", extend="max" if above else "neither")
    bar.set_label(f"uses per 100 {phase} tokens")
    bar.outline.set_visible(False)


def _levels(statistics: Statistics) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = statistics.resident.astype(np.int64) + 2 * statistics.pinned
    return found


def _memory_title(statistics: Statistics) -> str:
    resident = statistics.resident
    title = f"In memory: {percent(resident.mean(), 0)} of experts"
    share = shares(statistics)
    used = np.isfinite(share).all(axis=1)
    if not used.any():
        return title
    return f"{title}, {percent((share * resident)[used].sum() / used.sum(), 0)} of uses"


def _add_legend(axes: Axes, levels: npt.NDArray[np.int64]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    counts = np.bincount(levels.ravel(), minlength=len(_RESIDENCY))
    handles, names = [], []
    for (name, color, mark), count in zip(_RESIDENCY, counts, strict=True):
        if count:
            cell = Patch(facecolor=color, edgecolor=GREY, linewidth=0.5)
            handles.append((cell, Line2D([], [], **_mark(mark, 4.5))) if mark else (cell,))
            names.append(f"{name} ({count:,})")
    axes.legend(
        handles, names, loc="upper center", bbox_to_anchor=(0.5, UNDER), ncols=2 if len(names) > 3 else len(names),
        handlelength=1.2, handleheight=1.2, columnspacing=1.4,
    )  # fmt: skip


def _mark(color: str, size: float) -> dict[str, Any]:
    return {"linestyle": "", "marker": "x", "markersize": size, "markeredgewidth": max(size / 5, 0.6), "color": color}
