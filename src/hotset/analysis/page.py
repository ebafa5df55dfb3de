"""The report as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hotset.analysis.analyse import Analysis
from hotset.analysis.page_caching import caching_section, lookahead_section
from hotset.analysis.page_labels import labels_section
from hotset.analysis.page_pairs import locality_section, pairs_section
from hotset.analysis.page_parts import Section, decimal, percent, times
from hotset.analysis.page_saliency import saliency_section
from hotset.analysis.page_style import PAGE
from hotset.analysis.page_tokens import tokens_section
from hotset.analysis.page_usage import margins_section, usage_section
from hotset.report.svg import Figure, clean
from hotset.report.words import BOUND, LRU, plural

Tile = tuple[str, str]


def to_page(analysis: Analysis, *, version: str = "") -> tuple[str, list[Figure]]:
    """The HTML of the report, and the figures in it."""
    sections = _sections(analysis)
    title = f"{analysis.summary['model'] or analysis.name}: what its experts do"
    entries = "".join(f'<li><a href="#{each.anchor}">{clean(each.title)}</a></li>' for each in sections)
    body = "".join(section.render() for section in sections)
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{clean(title)}</title><style>{PAGE}</style></head><body>"
        f'<header><h1>{clean(title)}</h1><p class="lead">{clean(lead(analysis))}</p>{_tiles(analysis)}</header>'
        f"<nav><h2>Contents</h2><ol>{entries}</ol></nav><main>{body}</main>"
        f"<footer>Made by hotset {clean(version)} with <code>hotset analyze</code>. A use is one token that chose an "
        "expert; by chance means what random choices of the same size would show.</footer></body></html>\n"
    )
    return page, [figure for section in sections for figure in section.figures]


def _sections(a: Analysis) -> list[Section]:
    makers: list[tuple[Any, Callable[[], Section]]] = [
        (True, lambda: usage_section(a.usage)),
        (a.saliency, lambda: saliency_section(a.saliency)),  # type: ignore[arg-type]
        (a.margins, lambda: margins_section(a.margins, a.choice_margin)),  # type: ignore[arg-type]
        (a.labels or None, lambda: labels_section(a.labels)),
        (a.within or a.between, lambda: pairs_section(a.within, a.between)),
        (True, lambda: locality_section(a.repeats, a.reuse)),
        (a.drivers, lambda: tokens_section(a.drivers or [], a.text_of)),
        (True, lambda: caching_section(a.caching, a.usage.shape)),
        (a.lookahead, lambda: lookahead_section(a.lookahead)),  # type: ignore[arg-type]
        (True, lambda: _about(a)),
    ]
    return [make() for there, make in makers if there is not None]


def lead(a: Analysis) -> str:
    """What was analysed, in a sentence."""
    shape, summary = a.usage.shape, a.summary
    return (
        f"{a.name}: {plural(summary['tokens'], 'token')} of {plural(summary['requests'], 'request')} "
        f"({summary['prefill_tokens']:,} of prompts, {summary['decode_tokens']:,} of answers), "
        f"{plural(shape.layers, 'layer')} \u00d7 {plural(shape.experts, 'expert')}, {shape.top_k} for each token."
    )


def tiles(a: Analysis) -> list[Tile]:
    """The findings in short: a number, and what it is."""
    shape = a.usage.shape
    ran = a.usage.tokens > 0
    dead, expected = int(a.usage.dead[ran].sum()), float(a.usage.dead_by_chance[ran].sum())
    effective = float(a.usage.effective[ran].mean()) if ran.any() else None
    found = [
        (decimal(effective, 1), f"effective experts of {shape.experts}, mean over layers"),
        (f"{dead:,}", f"experts of {shape.total_experts:,} that no token chose; by chance {decimal(expected, 1)}"),
    ]
    if a.repeats.lags:
        chance = percent(a.repeats.even)
        words = f"of a token's experts were used by the token before; {chance} if all were used alike"
        found.append((percent(float(a.repeats.overall[0])), words))
    for study in a.labels[:1]:
        mean, chance = map(decimal, study.mean_distances())
        found.append((mean, f"mean distance between values of {study.key}, from 0 to 1; by chance {chance}"))
        if best := study.strongest(1):
            found.append((times(best[0]["lift"]), f"{best[0]['value']} in {_place(best[0])}, over its share of tokens"))
    return found + _cache_tiles(a)


def _place(row: dict[str, Any]) -> str:
    return f"expert {row['expert']} of layer {row['layer']}"


def _cache_tiles(a: Analysis) -> list[Tile]:
    rows = [row for row in a.caching.rows if row.phase == "decode" and row.budget == a.caching.rows[0].budget]
    rates = {row.policy: row.hit_rate for row in rows}
    best = max((policy for policy in rates if policy != BOUND), key=lambda policy: rates[policy], default=None)
    found = []
    if best is not None:
        words = f"hits with {best} in {rows[0].budget}" + (" of the experts" if rows[0].budget.endswith("%") else "")
        if LRU in rates and best != LRU:
            words += f"; lru {percent(rates[LRU])}"
        found.append((percent(rates[best]), f"{words}; optimum {percent(rates.get(BOUND))}"))
    if a.lookahead is not None and a.lookahead.scores:
        recall = a.lookahead.scores[0].recall
        found.append((percent(recall), "of the next layer's experts named by its router one layer before"))
    return found


def _tiles(a: Analysis) -> str:
    made = "".join(f'<div class="tile"><b>{clean(big)}</b><span>{clean(small)}</span></div>' for big, small in tiles(a))
    return f'<div class="tiles">{made}</div>'


def _about(a: Analysis) -> Section:
    section = Section("about", "What this rests on")
    section.say(f"Source: {a.summary['source'] or a.name}. Figures of caching are replays of the recorded routing.")
    if a.notes:
        items = "".join(f"<li>{clean(note)}</li>" for note in a.notes)
        section.parts.append(f"<ul>{items}</ul>")
    return section
