"""The section on what a cache would have done, and on what routers ahead predicted."""

from __future__ import annotations

import numpy as np

from hotset.analysis.caching import Caching, Kept
from hotset.analysis.lookahead import LookAhead
from hotset.analysis.page_parts import Section, decimal, percent, slug
from hotset.report.svg import Figure
from hotset.report.svg_charts import Bar, Line, draw_bars, draw_lines
from hotset.report.svg_grids import NOTHING, Axes, draw_grid
from hotset.report.words import BOUND, label_of
from hotset.shape import ModelShape

_STATES = ("hit", "miss", "idle")
_STATE_NAMES = ("used and resident: a hit", "used, not resident: a miss", "resident, not used")
_MAX_DRAWN = 4
_STEP_WIDTH = 28.0


def caching_section(caching: Caching, shape: ModelShape) -> Section:
    """Hit rates, precision and recall, and one layer over time."""
    section = Section("cache", "What a cache would do")
    if any(row.phase == "decode" for row in caching.rows):
        section.show(
            _hit_rates(caching),
            "Share of the experts of decode events that were resident when asked for, from an empty cache; belady "
            "knows the future, and no policy can do better.",
        )
    kept = [each for each in caching.kept if each.resident.sum()]
    if kept:
        _add_kept(section, kept, shape)
    for each in _drawn(caching):
        section.show(
            _over_time(each, caching),
            f"Experts of layer {caching.layer} over the first {caching.steps} steps of the answer of request "
            f"{caching.request}, with {each.policy} in {_memory(each.budget)}{_as_recorded(each, caching)}: blue was "
            "used and resident, orange used and not resident, grey resident for nothing.",
        )
    return section


def _as_recorded(kept: Kept, caching: Caching) -> str:
    same = caching.recorded is not None and (kept.policy, kept.budget) == caching.recorded[:2]
    return ", as when the trace was recorded" if same else ""


def _memory(budget: str) -> str:
    return f"memory for {budget} of the experts" if budget.endswith("%") else budget


def _hit_rates(caching: Caching) -> Figure:
    rows = [row for row in caching.rows if row.phase == "decode"]
    policies = list(dict.fromkeys(row.policy for row in rows))
    groups = []
    for budget in dict.fromkeys(row.budget for row in rows):
        own = [row for row in rows if row.budget == budget]
        bars = [
            Bar(label_of(row.policy), row.hit_rate, 7 if row.policy == BOUND else policies.index(row.policy),
                f"{row.misses_per_token:,.1f} misses per token")
            for row in own
        ]  # fmt: skip
        groups.append((_memory(budget), bars))
    return draw_bars("hit-rates", "Hit rate of each policy", groups, percent)


def _add_kept(section: Section, kept: list[Kept], shape: ModelShape) -> None:
    even = percent(shape.top_k / shape.experts)
    section.table(
        "Precision and recall of caching",
        "Precision: of the experts resident before a decode event, how many it used. Recall: of the experts it used, "
        f"how many were resident, which is the hit rate. Residents chosen at random would have a precision of {even} "
        "with one token per step.",
        ("policy", "memory", "slots", "precision", "recall"),
        [
            (label_of(each.policy), each.budget, f"{each.slots:,}", percent(row["precision"]), percent(row["recall"]))
            for each in kept
            for row in [each.as_dict()]
        ],
    )
    budget = kept[0].budget
    lines = [
        Line(label_of(each.policy), each.recall, 7 if each.policy == BOUND else i, dashed=each.policy == BOUND)
        for i, each in enumerate(kept)
        if each.budget == budget
    ]
    layers = [str(layer) for layer in range(shape.layers)]
    section.show(
        draw_lines(
            "hit-rates-by-layer", f"Hit rate by layer, {budget}", layers, lines, x_title="layer",
            write=lambda v: percent(v, 0), low=0, high=1,
        ),
        "The same hit rates layer by layer: layers differ in how well they can be cached.",
    )  # fmt: skip


def _drawn(caching: Caching) -> list[Kept]:
    """The policies whose residency is drawn, without the bound: as in the recorded run, else in the first budget."""
    recorded = caching.recorded
    budget = caching.kept[0].budget if caching.kept and recorded is None else recorded and recorded.budget
    own = [each for each in caching.kept if each.policy != BOUND and each.budget == budget]
    own.sort(key=lambda each: recorded is None or each.policy != recorded.policy)  # that of the run first
    return own[:_MAX_DRAWN] if caching.steps else []


def _over_time(kept: Kept, caching: Caching) -> Figure:
    resident, used = kept.watched.resident.T, kept.watched.used.T
    codes = np.full(resident.shape, NOTHING, np.int64)
    codes[resident] = 2
    codes[used & ~resident] = 1
    codes[used & resident] = 0
    hits, misses = used & resident, used & ~resident
    rate = percent(float(hits.sum() / max(int(used.sum()), 1)))

    def row(expert: int) -> str:
        return f"expert {expert}: {int(hits[expert].sum())} hits, {int(misses[expert].sum())} misses"

    return draw_grid(
        f"residency-{slug(kept.policy)}", f"{kept.policy}: layer {caching.layer} over time, {rate} hits",
        codes, _STATES, _STATE_NAMES, Axes("expert", "step"), row_title=row,
        cell_height=float(np.clip(520 / len(codes), 4, 10)), max_cell=_STEP_WIDTH,
    )  # fmt: skip


def lookahead_section(found: LookAhead) -> Section:
    """What the routers of the layers ahead predicted."""
    section = Section("lookahead", "Gate look-ahead")
    section.say(
        "Each layer's input was also given to the routers of the layers after it. Of as many predictions as experts "
        "are used, precision and recall are the same number; of twice as many, recall rises and precision falls."
    )
    section.table(
        "Precision and recall of look-ahead",
        f"Of the experts used, how many had been predicted so many layers before ({found.judged}).",
        ("layers ahead", "events", "recall = precision, k", "recall, 2k", "precision, 2k", "Brier score"),
        [
            (
                str(score.distance), f"{score.events:,}", percent(score.recall), percent(score.recall_2k),
                percent(score.precision_2k), decimal(score.brier, 3),
            )
            for score in found.scores
        ],
    )  # fmt: skip
    layers = [str(layer) for layer in range(len(found.scores[0].recall_by_layer))]
    lines = [
        Line(
            f"{score.distance} ahead",
            np.array([np.nan if value is None or i < score.distance else value for i, value in
                      enumerate(score.recall_by_layer)]),
            i,
        )
        for i, score in enumerate(found.scores)
    ]  # fmt: skip
    section.show(
        draw_lines(
            "lookahead", "Recall of look-ahead by layer", layers, lines, x_title="layer that was predicted",
            write=lambda v: percent(v, 0), low=0, high=1, height=260,
        ),
        "Share of each layer's experts that the look-ahead named among k: where it is high, prefetch can bring them "
        "in time.",
    )  # fmt: skip
    return section
