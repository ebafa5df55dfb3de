"""The sections on co-activation and on locality."""

from __future__ import annotations

import numpy as np

from hotset.analysis.coactivation import ENOUGH, Coactivation, PairCounts, alike_order
from hotset.analysis.locality import Repeats, Reuse
from hotset.analysis.page_parts import Section, decimal, percent, times
from hotset.report.svg import Figure
from hotset.report.svg_charts import Horizon, Line, draw_lines
from hotset.report.svg_grids import Axes, around, draw_grid
from hotset.trace import Phase

_LIFT = around(
    (1 / 8, 1 / 4, 1 / 2, 1 / 1.4, 1.4, 2, 4, 8),
    ("< 1/8", "1/8", "1/4", "1/2", "as by chance", "1.4\u00d7", "2\u00d7", "4\u00d7", "8\u00d7"),
)
_LEAST_TOLD = 0.1  # of all pairs: with fewer there is nothing to see


def pairs_section(within: Coactivation | None, between: Coactivation | None) -> Section:
    """Which experts are chosen together."""
    section = Section("pairs", "Co-activation")
    section.say(
        "Lift is how often two experts are chosen by the same token, over how often that would happen if each were "
        f"chosen on its own. Pairs with at least {ENOUGH} tokens, seen or expected, are compared."
    )
    for found, where in ((within, "within a layer"), (between, "between a layer and the next")):
        if found is not None:
            _add(section, found, where)
    return section


def _add(section: Section, found: Coactivation, where: str) -> None:
    chance = f"By chance lift {where} is {decimal(found.chance, 3)}"
    if found.shown is not None and np.isfinite(found.shown.lift).mean() >= _LEAST_TOLD:
        section.show(
            _matrix(found.shown, found.chance),
            f"{chance}; experts are ordered so that those with the same partners lie side by side, and blocks are "
            "groups that work together. No other layer has as much of it.",
        )
    section.table(
        f"Strongest pairs {where}",
        f"{chance}; the pairs furthest above it.",
        ("layer", "expert", "with layer", "with expert", "tokens", "expected", "lift"),
        [
            (
                str(pair["layer"]), str(pair["expert"]), str(pair["other_layer"]), str(pair["other_expert"]),
                f"{pair['tokens']:,}", decimal(pair["expected"], 1), times(pair["lift"]),
            )
            for pair in found.strongest[:10]
        ],
    )  # fmt: skip


def _matrix(counts: PairCounts, chance: float) -> Figure:
    lift = counts.lift
    rows, columns = alike_order(lift, chance)
    if counts.layer == counts.other:
        columns = rows
    ordered = lift[np.ix_(rows, columns)]
    same = counts.layer == counts.other
    title = f"Pairs of layer {counts.layer}" if same else f"Pairs of layers {counts.layer} and {counts.other}"

    def cell(row: int, column: int) -> str:
        a, b = int(rows[row]), int(columns[column])
        return f"{a} and {b}: {int(counts.together[a, b]):,} tokens, lift {times(float(lift[a, b]))}"

    def whole_row(row: int) -> str:
        best = np.argsort(-np.nan_to_num(lift[rows[row]]), kind="stable")[:4].tolist()
        return f"expert {int(rows[row])}, most with " + ", ".join(str(each) for each in best)

    size = float(np.clip(640 / len(rows), 2.5, 16))
    return draw_grid(
        "pairs-within" if same else "pairs-between", title, _LIFT.codes(ordered / max(chance, 1e-9)), _LIFT.classes,
        _LIFT.legend, Axes("", "", _names(rows, size), _names(columns, size)),
        cell_title=cell, row_title=whole_row, cell_height=size, max_cell=size,
    )  # fmt: skip


def _names(order: np.ndarray[tuple[int], np.dtype[np.int64]], size: float) -> list[str]:
    """Numbers of experts beside their rows, where there is room."""
    step = 1 if size >= 14 else 2 if size >= 7 else 4
    return [str(expert) if place % step == 0 else "" for place, expert in enumerate(order.tolist())]


def locality_section(repeats: Repeats, reuse: Reuse) -> Section:
    """How soon experts are used again."""
    section = Section("locality", "Locality")
    if repeats.lags:
        what = "an answer" if repeats.phase == Phase.DECODE else "a prompt"
        section.show(
            _repeats(repeats),
            f"Share of the experts of a token of {what} that the token so many places before it used in the same "
            "layer; the dashed lines are what tokens drawn at random would share, from one request, from all, and if "
            "all experts were used alike.",
        )
        section.show(
            _repeats_by_layer(repeats),
            "The same for the token just before, and eight before, layer by layer.",
        )
    section.show(
        _steps(reuse),
        "How many steps pass until an expert is used again, in bins that double; the dashed line is what choices "
        "without memory, each expert at its own rate, would give.",
    )
    section.show(
        _depth(reuse),
        "Of all uses, the share found among so many most recently used experts of the layer: the hit rate of an lru "
        "cache with so many slots per layer, from the number of experts per token on.",
    )
    return section


def _repeats(repeats: Repeats) -> Figure:
    horizons = [
        Horizon("by chance within a request", repeats.request),
        Horizon("by chance over all requests", repeats.popularity),
        Horizon("if all experts were used alike", repeats.even),
    ]
    return draw_lines(
        "repeats", "Repeats by lag", [str(lag) for lag in repeats.lags], [Line("repeats", repeats.overall, 0)],
        x_title="tokens before", write=lambda v: percent(v), low=0,
        horizons=[each for each in horizons if np.isfinite(each.value)],
    )  # fmt: skip


def _repeats_by_layer(repeats: Repeats) -> Figure:
    shown = [i for i, lag in enumerate(repeats.lags) if lag in (1, 8)]
    lines = [Line(f"lag {repeats.lags[i]}", repeats.rate[i], n) for n, i in enumerate(shown)]
    layers = [str(layer) for layer in range(repeats.rate.shape[1])]
    return draw_lines(
        "repeats-by-layer", "Repeats by layer", layers, lines, x_title="layer", write=lambda v: percent(v, 0), low=0,
        height=240, horizons=[Horizon("if all experts were used alike", repeats.even)],
    )  # fmt: skip


def _steps(reuse: Reuse) -> Figure:
    total, expected = max(int(reuse.steps.sum()), 1), max(float(reuse.steps_by_chance.sum()), 1e-9)
    last = max(int(np.flatnonzero(reuse.steps).max(initial=0)), 1) + 1
    names = ["1", *(f"{2 ** (b - 1) + 1}-{2**b}" if b > 1 else "2" for b in range(1, last))]
    lines = [
        Line("uses", reuse.steps[:last] / total, 0),
        Line("by chance", reuse.steps_by_chance[:last] / expected, 7, dashed=True),
    ]
    return draw_lines(
        "reuse", "Steps until an expert is used again", names, lines, x_title="steps", write=lambda v: percent(v, 0),
        low=0, height=260,
    )  # fmt: skip


def _depth(reuse: Reuse) -> Figure:
    total = max(int(reuse.depth.sum()) + reuse.first, 1)
    found = np.cumsum(reuse.depth) / total
    names = [str(slot + 1) for slot in range(len(found))]
    return draw_lines(
        "depth", "Reuse distances", names, [Line("found", found, 0)], x_title="most recently used experts of the layer",
        write=lambda v: percent(v, 0), low=0, high=1, height=260,
    )  # fmt: skip
