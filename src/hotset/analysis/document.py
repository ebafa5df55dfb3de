"""The analysis as one JSON document and as CSV tables."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from io import StringIO
from typing import Any

import numpy as np

from hotset.analysis.analyse import Analysis
from hotset.analysis.caching import Caching
from hotset.analysis.coactivation import Coactivation
from hotset.analysis.driving_tokens import DrivenExpert, most_driven
from hotset.analysis.labels import LabelStudy
from hotset.analysis.margins import QUANTILES
from hotset.analysis.tallies import Floats, Mask

_STRONGEST = 50
_QUANTILE_NAMES = tuple(f"p{100 * quantile:.0f}" for quantile in QUANTILES)
Table = tuple[Sequence[str], Iterable[Sequence[Any]]]


def to_document(analysis: Analysis) -> dict[str, Any]:
    """All figures of the report as plain values; what is not known is None or not a number."""
    a = analysis
    return {
        "trace": a.name,
        "summary": a.summary,
        "usage": {"by_layer": a.usage.by_layer(), "uses": a.usage.uses.tolist()},
        "margins": None if a.margins is None else a.margins.by_layer(),
        "choice_margin": None if a.choice_margin is None else _quantiles(a.choice_margin),
        "labels": {study.key: _label(study) for study in a.labels},
        "coactivation": {"within": _pairs(a.within), "between": _pairs(a.between)},
        "locality": _locality(a),
        "driving_tokens": None if a.drivers is None else _drivers(a, a.drivers),
        "cache": {
            "rows": [row.as_dict() for row in a.caching.rows],
            "kept": [each.as_dict() for each in a.caching.kept],
            "recorded": None if a.caching.recorded is None else a.caching.recorded._asdict(),
            "drawn": _drawn(a.caching),
        },
        "lookahead": None if a.lookahead is None else a.lookahead.as_dict(),
        "saliency": None if a.saliency is None else _saliency(a),
        "notes": a.notes,
    }


def _quantiles(values: Floats) -> list[dict[str, float]]:
    """Quantiles by layer."""
    return [dict(zip(_QUANTILE_NAMES, row, strict=True)) for row in values.tolist()]


def _label(study: LabelStudy) -> dict[str, Any]:
    chance = study.distance_by_chance
    return {
        "values": list(study.values),
        "requests": study.requests.tolist(),
        "tokens": study.tokens.tolist(),
        "uses": study.uses.tolist(),
        "distance": study.distance.tolist(),
        "distance_by_chance": None if chance is None else chance.tolist(),
        "divergence_bits_by_layer": study.mean_divergence.tolist(),
        "largest_lift_by_chance": None if study.lift_by_chance is None else study.lift_by_chance.tolist(),
        "experts_above_chance_by_layer": study.above_chance().tolist(),
        "specialised_experts_by_layer": study.specialised().tolist(),
        "strongest": study.strongest(_STRONGEST),
    }


def _pairs(found: Coactivation | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "lift_by_chance": found.chance,
        "tokens": found.tokens,
        "mean_log2_by_layer": found.spread.tolist(),
        "strongest": found.strongest[:_STRONGEST],
    }


def _locality(analysis: Analysis) -> dict[str, Any]:
    repeats, reuse = analysis.repeats, analysis.reuse
    return {
        "phase": repeats.phase.name.lower(),
        "repeat_rate": {str(lag): float(rate) for lag, rate in zip(repeats.lags, repeats.overall, strict=True)},
        "repeat_rate_by_layer": {
            str(lag): rates.tolist() for lag, rates in zip(repeats.lags, repeats.rate, strict=True)
        },
        "repeat_rate_by_chance": {
            "even_use": repeats.even,
            "all_requests": repeats.popularity,
            "same_request": repeats.request,
        },
        "uses_by_steps_since_last": reuse.steps.tolist(),
        "uses_by_steps_since_last_by_chance": reuse.steps_by_chance.tolist(),
        "uses_by_reuse_distance": reuse.depth.tolist(),
        "first_uses": reuse.first,
    }


def _drivers(analysis: Analysis, found: list[DrivenExpert]) -> dict[str, Any]:
    """How many experts tokens drive, and those of each layer that they drive most; tokens.csv has all."""
    return {
        "experts": len(found),
        "strongest": [each.as_dict(analysis.text_of) for each in most_driven(found, _STRONGEST, _STRONGEST)],
    }


def _drawn(caching: Caching) -> dict[str, Any]:
    """One layer over one request: by step the experts that were used, and by policy those that were resident."""
    return {
        "layer": caching.layer,
        "request": caching.request,
        "steps": caching.steps,
        "used": _experts_by_step(caching.kept[0].watched.used) if caching.kept else [],
        "resident": [
            {"policy": each.policy, "budget": each.budget, "experts": _experts_by_step(each.watched.resident)}
            for each in caching.kept
        ],
    }


def _experts_by_step(grid: Mask) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in grid]


def _saliency(analysis: Analysis) -> dict[str, Any]:
    found = analysis.saliency
    assert found is not None  # noqa: S101 - asked for only with one
    return {
        "source": found.source,
        "measures": {name: np.asarray(grid).tolist() for name, grid in found.measures.items()},
        "super_experts": [list(key) for key in found.super_experts],
    }


def to_tables(analysis: Analysis) -> dict[str, str]:
    """CSV tables by file name."""
    tables = {"experts.csv": _experts(analysis), "layers.csv": _layers(analysis), "pairs.csv": _pair_rows(analysis)}
    if analysis.labels:
        tables |= {"labels.csv": _label_rows(analysis), "distances.csv": _distance_rows(analysis)}
    if analysis.drivers is not None:
        tables["tokens.csv"] = _token_rows(analysis)
    from hotset.report import to_csv

    found = {name: _csv(*table) for name, table in tables.items()}
    return found | {"cache.csv": to_csv(analysis.caching.rows)}


def _csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def _experts(a: Analysis) -> Table:
    prefill, decode = a.usage.by_phase
    share = a.usage.share
    measures = {} if a.saliency is None else {name: np.asarray(grid) for name, grid in a.saliency.measures.items()}
    rows = (
        (layer, expert, prefill[layer, expert], decode[layer, expert], f"{share[layer, expert]:.6g}",
         *(f"{grid[layer, expert]:.6g}" for grid in measures.values()))
        for layer, expert in np.ndindex(share.shape)
    )  # fmt: skip
    return ("layer", "expert", "prefill_uses", "decode_uses", "share", *measures), rows


def _layers(a: Analysis) -> Table:
    rows = a.usage.by_layer()
    header = list(rows[0])
    columns = [[_number(row[name]) for name in header] for row in rows]
    if a.margins is not None:
        measured = [("gap_first_second", a.margins.first_gap), ("share_of_last", a.margins.last_share)]
        for name, values in measured + ([] if a.choice_margin is None else [("choice_margin", a.choice_margin)]):
            header += [f"{name}_{quantile}" for quantile in _QUANTILE_NAMES]
            columns = [[*row, *map(_number, more)] for row, more in zip(columns, values.tolist(), strict=True)]
    return header, columns


def _label_rows(a: Analysis) -> Table:
    def rows() -> Iterable[Sequence[Any]]:
        for study in a.labels:
            lift = study.lift
            for value, layer, expert in np.argwhere(study.uses > 0).tolist():
                uses = int(study.uses[value, layer, expert])
                yield study.key, study.values[value], layer, expert, uses, _number(lift[value, layer, expert])

    return ("label", "value", "layer", "expert", "uses", "lift"), rows()


def _distance_rows(a: Analysis) -> Table:
    def rows() -> Iterable[Sequence[Any]]:
        for study in a.labels:
            distance = study.distance
            chance = study.distance_by_chance
            for i, j in zip(*np.triu_indices(len(study.values), 1), strict=True):
                by_chance = "" if chance is None else _number(chance[i, j])
                yield study.key, study.values[i], study.values[j], _number(distance[i, j]), by_chance

    return ("label", "value", "other", "distance", "by_chance"), rows()


def _pair_rows(a: Analysis) -> Table:
    header = ("layer", "expert", "other_layer", "other_expert", "tokens", "expected", "lift")
    found = [pair for each in (a.within, a.between) if each is not None for pair in each.strongest]
    return header, ([_number(pair[name]) for name in header] for pair in found)


def _token_rows(a: Analysis) -> Table:
    def rows() -> Iterable[Sequence[Any]]:
        for each in a.drivers or ():
            for driver in each.drivers:
                text = "" if a.text_of is None else a.text_of(driver.token)
                yield (
                    each.layer,
                    each.expert,
                    each.uses,
                    driver.token,
                    text,
                    driver.occurrences,
                    driver.uses,
                    _number(driver.surprise),
                )

    return ("layer", "expert", "expert_uses", "token", "text", "occurrences", "uses", "log_likelihood_ratio"), rows()


def _number(value: Any) -> Any:
    """A number as short as it is exact enough; nothing where it is not known."""
    if isinstance(value, float | np.floating):
        return f"{value:.6g}" if np.isfinite(value) else ""
    return value
