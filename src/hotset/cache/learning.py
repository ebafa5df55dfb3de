"""From a profile to a cache that starts warm, and from a cache to what a profile keeps of its policy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.cache.controller import Controller
from hotset.cache.counters import Count
from hotset.options.run import PRIOR_TOKENS as PRIOR_TOKENS
from hotset.profile.matrices import recall
from hotset.profile.profile import Profile, State
from hotset.shape import ExpertKey
from hotset.trace import Phase

_WEIGHT = "sum.tokens"


def prime(controller: Controller, profile: Profile, prior_tokens: int = PRIOR_TOKENS) -> None:
    """Let a fresh cache's policy begin with what a profile knows, worth so many tokens and no more."""
    same = prior_tokens and profile.policy == controller.policy.name
    recalled_tokens = _recall(controller, profile.learnt, prior_tokens) if same else 0
    if prior_tokens and profile.matrices is not None and controller.policy.collects_requests:
        recall(controller.state, profile.matrices)
    controller.seed_from_rates(profile.hotness(), prior_tokens, recalled_tokens)


def hottest(profile: Profile) -> list[ExpertKey]:
    """All experts that were used at all, hottest first; among equals the earlier layer, which is needed sooner."""
    heat = profile.hotness()
    order = np.argsort(-heat, axis=None, kind="stable")
    order = order[heat.reshape(-1)[order] > 0]
    return [ExpertKey(*divmod(int(place), profile.shape.experts)) for place in order]


def learnt(controller: Controller) -> State:
    """What the policy has learnt beyond counts, by name; how it is merged stands before each name."""
    persisted = controller.policy.persisted
    if not persisted:
        return {}
    state = controller.state._asdict()
    tokens = controller.recalled_tokens + int(controller.table.counters[Phase.DECODE, Count.TOKENS].max())
    return {f"{how}.{name}": state[name].copy() for name, how in persisted.items() if state[name].size} | {
        _WEIGHT: np.array([float(tokens)])
    }


def _recall(controller: Controller, saved: State, prior_tokens: int) -> int:
    """Take up what was learnt, with sums cut down to what so many tokens would have brought; of how many it is."""
    weight = float(saved[_WEIGHT][0]) if saved.get(_WEIGHT, np.zeros(0)).shape == (1,) else 0.0
    if not 0 < weight < math.inf:
        return 0
    kept = min(1.0, prior_tokens / weight)
    state = controller.state._asdict()
    for name, how in controller.policy.persisted.items():
        array: npt.NDArray[Any] | None = saved.get(f"{how}.{name}")
        if array is None or array.shape != state[name].shape or not np.isfinite(array).all():
            continue
        if how == "sum" and (array < 0).any():
            continue
        state[name][...] = array if how == "mean" else array * kept
    return round(weight * kept)
