"""All measures of one workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hotset.analysis.caching import CacheQuestion, Caching, count_replays, measure_caching
from hotset.analysis.coactivation import Coactivation, between_layers, within_layers
from hotset.analysis.driving_tokens import DrivenExpert, find_drivers
from hotset.analysis.labels import TRACE, LabelStudy, keys_to_study, study_label, study_labels
from hotset.analysis.locality import Repeats, Reuse, measure_repeats, measure_reuse
from hotset.analysis.lookahead import LookAhead, measure_lookahead
from hotset.analysis.margins import Margins, measure_margins
from hotset.analysis.tallies import Floats
from hotset.analysis.token_text import Decode
from hotset.analysis.usage import Usage, measure_usage
from hotset.errors import HotsetError
from hotset.shape import ExpertKey
from hotset.trace import Phase, Trace
from hotset.trace.combine import concat
from hotset.trace.summary import summarise

_MEASURES = 8


@dataclass(frozen=True, eq=False)
class SaliencyGrids:
    """Measures of every expert that a model recorded as it ran, by name: grids of layers and experts.

    Experts without which a model fails ("super experts") are never to be pruned.
    """

    measures: Mapping[str, np.ndarray[Any, np.dtype[np.float64]]]
    super_experts: Sequence[ExpertKey] = ()
    source: str = ""  # what it was recorded on
    choice_margin: Floats | None = None  # [layers, quantiles]: the last score that was chosen minus the next


@dataclass(frozen=True, eq=False)
class Analysis:
    """What the experts of a model do, measured on one workload; what a trace cannot tell is None."""

    name: str
    summary: dict[str, Any]
    usage: Usage
    margins: Margins | None
    labels: list[LabelStudy]
    within: Coactivation | None
    between: Coactivation | None
    repeats: Repeats
    reuse: Reuse
    drivers: list[DrivenExpert] | None
    caching: Caching
    lookahead: LookAhead | None
    saliency: SaliencyGrids | None = None
    text_of: Decode | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def choice_margin(self) -> Floats | None:
        """By layer the margins of the routers' choices, where the model ran and some are known."""
        found = None if self.saliency is None else self.saliency.choice_margin
        return None if found is None or not np.isfinite(found).any() else found


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to analyse; None: what suits the trace."""

    labels: Sequence[str] | None = None
    caching: CacheQuestion = field(default_factory=CacheQuestion)


def join_traces(traces: Mapping[str, Trace]) -> tuple[str, Trace]:
    """Several traces of one model as one, with a label that tells them apart; returns what to call it."""
    if len(traces) == 1:
        return next(iter(traces.items()))
    marked = [
        replace(trace, labels=tuple({**label, TRACE: name} for label in trace.labels or ({},) * trace.requests))
        for name, trace in traces.items()
    ]
    names = list(traces)
    shown = ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
    try:
        return shown, concat(marked)
    except HotsetError as error:
        raise HotsetError(f"{error}: analyse the traces of one model at a time") from None


def count_parts(trace: Trace, question: Question) -> int:
    """How often `analyse` will call `advance`."""
    return _MEASURES + count_replays(trace, question.caching)


def analyse(
    name: str,
    trace: Trace,
    question: Question | None = None,
    *,
    text_of: Decode | None = None,
    saliency: SaliencyGrids | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Analysis:
    """Measure everything that a trace can tell."""
    question = question or Question()
    _check_labels(trace, question)

    def told(measure: Callable[[Trace], Any]) -> Any:
        found = measure(trace)
        advance()
        return found

    caching = measure_caching(trace, question.caching, name, advance=advance)
    studies, notes = _studies(trace, question)
    advance()
    return Analysis(
        name=name,
        summary=summarise(trace),
        usage=told(measure_usage),
        margins=told(measure_margins),
        labels=studies,
        within=told(within_layers),
        between=told(between_layers),
        repeats=told(measure_repeats),
        reuse=measure_reuse(trace),
        drivers=told(find_drivers),
        caching=caching,
        lookahead=told(measure_lookahead),
        saliency=saliency,
        text_of=text_of,
        notes=[*notes, *_missing(trace, studies), *caching.notes],
    )


def _studies(trace: Trace, question: Question) -> tuple[list[LabelStudy], list[str]]:
    """Requests told apart by the labels that were named, or by those that tell most; and which are left out."""
    if question.labels is not None:
        keys = dict.fromkeys(question.labels)
        return [found for key in keys if (found := study_label(trace, key)) is not None], []
    studies = study_labels(trace, keys_to_study(trace))
    chosen = {study.key for study in studies}
    rest = [key for key in _keys(trace) if key not in chosen and key != TRACE]
    more = f"labels left out, which --label KEY names: {', '.join(rest)}"
    return studies, [more] if rest and chosen else []


def _keys(trace: Trace) -> list[str]:
    return sorted({key for label in trace.labels for key in label})


def _check_labels(trace: Trace, question: Question) -> None:
    """Refuse a label that was named and tells nothing, before the work."""
    there = _keys(trace)
    for key in question.labels or ():
        values = {label[key] for label in trace.labels if key in label}
        if len(values) < 2:
            what = f"no request has a label {key!r}" if not values else f"all requests have the same {key!r}"
            raise HotsetError(f"{what}: " + (f"there are {', '.join(there)}" if there else "this trace has no labels"))


def _missing(trace: Trace, studies: list[LabelStudy]) -> list[str]:
    """What the trace does not hold, and how it would."""
    found = []
    if not studies:
        found.append("no label tells requests apart: record prompts with labels, or give several traces")
    if trace.weights is None:
        found.append("the trace has no router weights, so nothing is said about margins")
    if trace.token_ids is None:
        found.append("the trace has no token ids, so nothing is said about tokens that drive experts")
    if trace.predictions is None:
        found.append("the trace has no predictions of routers ahead: record it with --record-lookahead")
    if not trace.count(Phase.DECODE):
        found.append("the trace holds prompts only: locality is that of prompts, and a cache has no decode events")
    return found
