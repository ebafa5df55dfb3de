"""The sections on use and on margins."""

from __future__ import annotations

import numpy as np

from hotset.analysis.margins import Margins
from hotset.analysis.page_parts import Section, decimal, percent
from hotset.analysis.tallies import Floats
from hotset.analysis.usage import Usage
from hotset.report.svg import Figure
from hotset.report.svg_charts import Horizon, Line, draw_lines
from hotset.report.svg_grids import Axes, Scale, draw_grid, rising

_NOT_RECORDED = (
    "The first expert that was not chosen has at most the weight of the last chosen one: the margin of the choice "
    "itself lies between 0 and the share of the last."
)
_RECORDED = "The margin of the choice itself was recorded as the model ran."
_SCORES = "Scores are what the router chooses by: its logits, unless it adds corrections to, say, their sigmoid."
_BOUNDS = (1 / 4, 1 / 2, 1 / 1.4, 1 / 1.15, 1.15, 1.4, 2, 4)
_LEGEND = ("< 1/4", "1/4", "1/2", "0.7", "even use", "1.15\u00d7", "1.4\u00d7", "2\u00d7", "4\u00d7 and more")


def usage_section(usage: Usage) -> Section:
    """Who is used how much."""
    section = Section("use", "Use of each expert")
    section.show(
        _heat(usage),
        "Each cell is one expert of one layer; its colour is its share of the layer's uses over what even use would "
        "give, and unused experts are pink.",
    )
    section.show(
        _evenness(usage),
        "Effective experts are as many evenly used ones as would have the same entropy; the other two lines are how "
        "few experts make 90 and 50 % of the uses.",
    )
    section.table(
        "Evenness by layer",
        "Gini is 0 for even use and near 1 where one expert takes everything; dead experts stand beside the number "
        "that random choices of as many tokens would leave unused.",
        ("layer", "tokens", "entropy, bits", "effective", "Gini", "make 50 %", "make 90 %", "dead", "by chance"),
        [
            (
                str(row["layer"]), f"{row['tokens']:,}", decimal(row["entropy_bits"]),
                decimal(row["effective_experts"], 1), decimal(row["gini"]), str(row["experts_of_50_percent"]),
                str(row["experts_of_90_percent"]), str(row["dead"]), decimal(row["dead_by_chance"], 1),
            )
            for row in usage.by_layer()
        ],
    )  # fmt: skip
    return section


def _heat(usage: Usage) -> Figure:
    share, uses = usage.share, usage.uses
    scale = rising(_BOUNDS, _LEGEND)
    scale = Scale(scale.bounds, (*scale.classes, "dead"), (*scale.legend, "unused"))
    codes = scale.codes(share * usage.shape.experts)
    codes = np.where((uses == 0) & np.isfinite(share), len(scale.classes) - 1, codes)

    def cell(layer: int, expert: int) -> str:
        return f"layer {layer}, expert {expert}: {uses[layer, expert]:,} uses, {percent(share[layer, expert], 2)}"

    def row(layer: int) -> str:
        best = np.argsort(-uses[layer], kind="stable")[:5].tolist()
        return f"layer {layer}, most used: " + ", ".join(f"{e} ({percent(share[layer, e])})" for e in best)

    return draw_grid(
        "use", "Share of uses by layer and expert", codes, scale.classes, scale.legend, Axes("layer", "expert"),
        cell_title=cell, row_title=row, max_titled=8192,
    )  # fmt: skip


def _evenness(usage: Usage) -> Figure:
    layers = [str(layer) for layer in range(usage.shape.layers)]
    ran = usage.uses.sum(axis=1) > 0
    fifty, ninety = (np.where(ran, usage.covering(part), np.nan) for part in (0.5, 0.9))
    lines = [
        Line("effective experts", usage.effective, 0),
        Line("make 90 % of uses", ninety, 2),
        Line("make 50 % of uses", fifty, 1),
    ]
    return draw_lines(
        "evenness", "How many experts a layer uses", layers, lines, x_title="layer", write=lambda v: f"{v:.0f}",
        horizons=[Horizon("experts", usage.shape.experts)], low=0,
    )  # fmt: skip


def margins_section(margins: Margins, choice: Floats | None = None) -> Section:
    """How clear the routers' choices were; `choice` has the margins of the choice itself, by layer and quantile."""
    section = Section("margins", "Margins of the router")
    words = "A trace holds the weights of the chosen experts only, here as shares of their sum. "
    section.say(words + (_NOT_RECORDED if choice is None else _RECORDED))
    if choice is not None:
        section.show(
            _choice(choice),
            f"The lowest score that was chosen minus the highest that was not; the line is the median and the band "
            f"holds the middle 80 % of tokens. {_SCORES}",
        )
    section.show(
        _ranks(margins),
        "Mean share of a token's router weight by rank: where the first line is far above the rest, one expert does "
        "most of the work.",
    )
    if margins.share.shape[1] > 1:
        section.show(
            _gaps(margins),
            "The gap between the two largest shares, and the share of the last chosen expert; lines are medians and "
            "bands hold the middle 80 % of tokens.",
        )
    return section


def _choice(choice: Floats) -> Figure:
    layers = [str(layer) for layer in range(len(choice))]
    line = Line("last chosen minus first not chosen", choice[:, 1], 0, band=(choice[:, 0], choice[:, 2]))
    return draw_lines(
        "choice", "Margin of the choice", layers, [line], x_title="layer", write=lambda v: f"{v:.3g}", low=0
    )


def _ranks(margins: Margins) -> Figure:
    layers = [str(layer) for layer in range(len(margins.share))]
    ranks = margins.share.shape[1]
    shown = sorted({0, 1, ranks // 2, ranks - 1} & set(range(ranks)))
    lines = [Line(f"rank {rank + 1}", margins.share[:, rank], i) for i, rank in enumerate(shown)]
    return draw_lines(
        "weights", "Router weight by rank", layers, lines, x_title="layer", write=lambda v: f"{100 * v:.0f} %",
        horizons=[Horizon("even", 1 / ranks)], low=0,
    )  # fmt: skip


def _gaps(margins: Margins) -> Figure:
    layers = [str(layer) for layer in range(len(margins.share))]
    lines = [
        Line(name, values[:, 1], color, band=(values[:, 0], values[:, 2]))
        for name, values, color in (
            ("first minus second", margins.first_gap, 0), ("last chosen", margins.last_share, 1),
        )
    ]  # fmt: skip
    return draw_lines(
        "gaps", "Gaps between router weights", layers, lines, x_title="layer", write=lambda v: f"{100 * v:.0f} %", low=0
    )
