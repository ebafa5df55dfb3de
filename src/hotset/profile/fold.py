"""Taking new use into a profile: what is old fades by a half-life in tokens, so that a profile never grows stiff."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import numpy as np

from hotset.profile.combine import total
from hotset.profile.profile import Fingerprint, Profile
from hotset.profile.statistics import MAX_SPANS, Counts, Grid, History, Mark
from hotset.shape import ModelShape
from hotset.trace import Phase, Trace

HALF_LIFE_TOKENS = 16_384
"""After so many tokens of a phase, what was counted before is worth half: some twenty long conversations."""


def now() -> str:
    """The time as profiles write it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def weigh(uses: Grid, tokens: Counts) -> Grid:
    """Plain counts as decayed ones, the tokens of each phase taken as spread evenly over the time they took."""
    kept = 0.5 ** (1 / HALF_LIFE_TOKENS)
    mass = (1 - kept ** tokens.astype(float)) / (1 - kept)
    scale = np.divide(mass, tokens, out=np.ones(len(tokens)), where=tokens > 0)
    weighed: Grid = uses * scale[:, None, None]
    return weighed


def fold(old: Profile | None, new: Profile) -> Profile:
    """A profile that goes on: `new` holds the plain counts of what happened since the old one was written."""
    fresh = weigh(new.uses, new.tokens)
    if old is None:
        return replace(new, uses=fresh)
    faded = 0.5 ** (new.tokens / HALF_LIFE_TOKENS)
    learned = new if new.learnt or not old.learnt else old  # a policy that learns nothing leaves what another learnt
    return replace(
        new,
        policy=learned.policy,
        learnt=learned.learnt,
        uses=old.uses * faded[:, None, None] + fresh,
        tokens=old.tokens + new.tokens,
        created=old.created,
        hits=total([old.hits, new.hits]),
        misses=total([old.misses, new.misses]),
        history=_joined(old.history, new.history),
        matrices=old.matrices if new.matrices is None else new.matrices,  # a run goes on with those of the profile
        meta=old.meta | new.meta,
    )


def profile_of(trace: Trace, fingerprint: Fingerprint) -> Profile:
    """What a recorded trace says of its workload: counts alone, for nothing was cached while it was recorded."""
    return fold(None, raw_profile(trace.shape, fingerprint, *count(trace)))


def count(trace: Trace) -> tuple[Grid, Counts]:
    """The tokens that used each expert, and all tokens, by phase."""
    uses = np.zeros((len(Phase), trace.shape.layers, trace.shape.experts))
    for phase in Phase:
        chosen = trace.experts[trace.phase == phase]
        layers = np.broadcast_to(np.arange(trace.shape.layers)[None, :, None], chosen.shape)
        known = chosen >= 0
        np.add.at(uses[phase], (layers[known], chosen[known]), 1.0)
    return uses, np.bincount(trace.phase, minlength=len(Phase)).astype(np.int64)


def raw_profile(shape: ModelShape, fingerprint: Fingerprint, uses: Grid, tokens: Counts) -> Profile:
    """Plain counts as a profile of this moment."""
    moment = now()
    return Profile(shape, fingerprint, uses, tokens, moment, moment)


def _joined(old: History, new: History) -> History:
    """One history after the other, without the oldest spans if there are too many."""
    begin = int(old.spans[:, 0].sum())
    spans = np.concatenate([old.spans, new.spans])
    cut = int(spans[: max(len(spans) - MAX_SPANS, 0), 0].sum())
    marks = [*old.marks, *(Mark(mark.tokens + begin, mark.label) for mark in new.marks)]
    kept = tuple(Mark(mark.tokens - cut, mark.label) for mark in marks if mark.tokens >= cut)
    return History(spans[-MAX_SPANS:], kept[-MAX_SPANS:])
