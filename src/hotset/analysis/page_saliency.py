"""The section on saliency, where it was recorded as the model ran: grids by measure, and super experts."""

from __future__ import annotations

import numpy as np

from hotset.analysis.analyse import SaliencyGrids
from hotset.analysis.page_parts import Section, slug
from hotset.analysis.tallies import Floats
from hotset.report.svg import Figure
from hotset.report.svg_grids import Axes, draw_grid, rising

_PARTS = 9
MEANINGS = {
    "frequency": "share of tokens that choose the expert",
    "gate": "sum of the weights that its output gets, per token",
    "man": "mean norm of its output",
    "msan": "mean squared norm of its output",
    "ean": "sum of the norms of its outputs",
    "reap": "mean of the norm of its output times the weight that it gets",
    "largest": "largest absolute number in its outputs",
}
"""What each measure is, in words; those of others are called by their names."""


def saliency_section(saliency: SaliencyGrids) -> Section:
    """A grid per measure, and the experts that must not be pruned."""
    section = Section("saliency", "Saliency")
    if saliency.source:
        section.say(f"Recorded on {saliency.source}.")
    for name, grid in saliency.measures.items():
        section.show(
            _grid(name, np.asarray(grid, np.float64)),
            f"Each cell is one expert; its colour is its rank within its layer by {_meaning(name)}, the strongest for "
            "the highest. Experts are compared within a layer only.",
        )
    rows = [
        (str(key.layer), str(key.expert), *(_value(np.asarray(grid), key) for grid in saliency.measures.values()))
        for key in saliency.super_experts
    ]
    if rows:
        section.table(
            "Super experts",
            "Experts with activations far above all others: without them a model fails, so they are never pruned.",
            ("layer", "expert", *saliency.measures),
            rows,
        )
    elif saliency.measures:
        section.say("No expert stands out as a super expert.")
    return section


def _meaning(name: str) -> str:
    return f"{name} ({MEANINGS[name]})" if name in MEANINGS else name


def _value(grid: Floats, key: tuple[int, int]) -> str:
    return f"{float(grid[key]):.4g}"


def _grid(name: str, grid: Floats) -> Figure:
    ranks = np.argsort(np.argsort(grid, axis=1, kind="stable"), axis=1) / max(grid.shape[1] - 1, 1)
    ranks[~np.isfinite(grid)] = np.nan
    legend = ("lowest", *("" for _ in range(_PARTS - 2)), "highest of the layer")
    scale = rising(tuple(i / _PARTS for i in range(1, _PARTS)), legend)
    return draw_grid(
        f"saliency-{slug(name)}", f"Saliency: {name}", scale.codes(ranks), scale.classes, scale.legend,
        Axes("layer", "expert"),
        cell_title=lambda layer, expert: f"layer {layer}, expert {expert}: {grid[layer, expert]:.4g}",
        row_title=lambda layer: f"layer {layer}, highest: expert {int(np.nan_to_num(grid[layer]).argmax())}",
    )  # fmt: skip
