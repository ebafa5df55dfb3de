"""The section on what experts are specialised in."""

from __future__ import annotations

import numpy as np

from hotset.analysis.labels import ENOUGH, LabelStudy
from hotset.analysis.page_parts import Section, decimal, percent, slug, times
from hotset.analysis.tallies import Floats
from hotset.report.svg import Figure
from hotset.report.svg_charts import Horizon, Line, draw_histograms, draw_lines
from hotset.report.svg_grids import NOTHING, Axes, Scale, draw_grid, rising

_LIFT = Scale(
    (1.4, 2, 4, 8),
    ("blank", "d5", "d6", "d7", "d8"),
    ("below 1.4\u00d7", "1.4\u00d7", "2\u00d7", "4\u00d7", "8\u00d7 and more"),
)
_MAX_CELLS = 40_000


def labels_section(studies: list[LabelStudy]) -> Section:
    """One block of figures per label."""
    section = Section("labels", "Specialisation by label")
    for study in studies:
        _add(section, study)
    return section


def _add(section: Section, study: LabelStudy) -> None:
    key = study.key
    section.say(f"By {key}: {len(study.values)} values of {int(study.requests.sum()):,} requests. {_chance(study)}")
    section.show(
        _distances(study),
        f"Jensen-Shannon distance between the experts that two values of {key} use, less what samples of this size "
        "have by chance, over all layers: 0 is the same use, 1 no expert in common.",
    )
    section.show(
        _by_layer(study),
        f"Mean divergence between values of {key} in each layer: the higher, the more the layer's experts are "
        "specialised; the dashed line is what labels dealt at random to the requests give.",
    )
    layer = _clearest(study)
    section.show(
        _histograms(study, layer),
        f"Use of the experts of layer {layer}, where values of {key} differ most, one histogram per value; the dashed "
        "lines are even use.",
    )
    if study.uses.size <= _MAX_CELLS:
        section.show(
            _lifts(study),
            f"All experts, a block of rows per value of {key} with one row per layer: experts in colour serve it more "
            "than its share of tokens.",
        )
    section.table(
        f"Experts most specialised by {key}",
        f"Share of an expert's uses that one value makes, beside the value's share of all tokens; lift is the first "
        f"over the second, of experts with at least {ENOUGH} uses; the last column is the largest that the value had "
        "with labels dealt at random.",
        ("value", "layer", "expert", "uses", "share of the expert", "share of tokens", "lift", "by chance"),
        [
            (
                row["value"], str(row["layer"]), str(row["expert"]), f"{row['uses']:,}", percent(row["share"]),
                percent(row["share"] / row["lift"]), times(row["lift"]), times(row["largest_by_chance"]),
            )
            for row in study.strongest(16)
        ],
    )  # fmt: skip


def _chance(study: LabelStudy) -> str:
    """What labels dealt at random would show."""
    if study.chance is None:
        return "There are too few requests per value, or too many in all, to say what chance would give."
    above, all_experts = int(study.above_chance().sum()), study.uses[0].size
    here, by_chance = map(decimal, study.mean_distances())
    return (
        f"Labels dealt at random to the requests, {len(study.chance.largest_lift)} times, give a mean distance of "
        f"{by_chance}, against {here} here. Of {all_experts:,} experts, {above:,} "
        f"serve some value of {study.key} more than any expert did in those dealings."
    )


def _clearest(study: LabelStudy) -> int:
    """The layer in which values differ most."""
    mean = study.mean_divergence
    return int(np.nan_to_num(mean, nan=-1.0).argmax())


def _distances(study: LabelStudy) -> Figure:
    order = _neighbours(study.distance)
    names = [study.values[place] for place in order]
    distance = study.distance[np.ix_(order, order)]
    np.fill_diagonal(distance, np.nan)
    most = float(np.nanmax(distance, initial=0.0)) or 1.0
    bounds = tuple(most * i / 8 for i in range(1, 8))
    scale = rising(bounds, (f"< {bounds[0]:.2f}", *(f"{bound:.2f}" for bound in bounds)))
    chance = None if study.distance_by_chance is None else study.distance_by_chance[np.ix_(order, order)]

    def cell(row: int, column: int) -> str:
        by_chance = "" if chance is None else f", by chance {decimal(chance[row, column])}"
        return f"{names[row]} and {names[column]}: {decimal(distance[row, column])}{by_chance}"

    return draw_grid(
        f"distance-{slug(study.key)}", f"Distance between values of {study.key}", scale.codes(distance), scale.classes,
        scale.legend, Axes("", "", names, names), cell_title=cell, cell_height=22, max_cell=44,
    )  # fmt: skip


def _neighbours(distance: Floats) -> list[int]:
    """An order in which each value stands beside the nearest one that is left."""
    known = np.where(np.isfinite(distance), distance, 2.0)
    order = [int(known.sum(axis=1).argmax())]
    while len(order) < len(known):
        rest = [place for place in range(len(known)) if place not in order]
        order.append(min(rest, key=lambda place: float(known[order[-1], place])))
    return order


def _by_layer(study: LabelStudy) -> Figure:
    mean = study.mean_divergence
    lines = [Line("between values", mean, 0)]
    digits = 2 if float(np.nanmax(mean, initial=0.0)) >= 0.1 else 3
    by_chance = [] if study.chance is None else [Horizon("by chance", float(study.chance.divergence.mean()))]
    layers = [str(layer) for layer in range(study.uses.shape[1])]
    return draw_lines(
        f"layers-{slug(study.key)}", f"How much each layer tells {study.key} apart", layers, lines, x_title="layer",
        write=lambda v: f"{v:.{digits}f} bits", horizons=by_chance, low=min(0.0, *(h.value for h in by_chance), 0.0),
        height=240,
    )  # fmt: skip


def _histograms(study: LabelStudy, layer: int) -> Figure:
    uses = study.uses[:, layer].astype(np.float64)
    share = uses / np.maximum(uses.sum(axis=1, keepdims=True), 1)
    return draw_histograms(
        f"histograms-{slug(study.key)}", f"Use by {study.key} in layer {layer}", study.values, share,
        even=1 / uses.shape[1], column_title="expert",
    )  # fmt: skip


def _lifts(study: LabelStudy) -> Figure:
    values, layers, experts = study.uses.shape
    codes = np.full((values, layers + 1, experts), NOTHING, np.int64)  # a blank row after each block
    codes[:, :layers] = _LIFT.codes(np.where(study.uses >= ENOUGH, study.lift, 0.0))
    names = [value if layer == layers // 2 else "" for value in study.values for layer in range(layers + 1)]
    return draw_grid(
        f"lift-{slug(study.key)}", f"Experts that serve each {study.key} more than its share",
        codes.reshape(-1, experts), _LIFT.classes, _LIFT.legend, Axes("", "expert", names),
        cell_height=float(np.clip(900 / (values * layers), 2.5, 9)),
        row_title=lambda row: f"{study.values[row // (layers + 1)]}, layer {row % (layers + 1)}",
    )  # fmt: skip
