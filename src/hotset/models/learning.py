"""What a person wants to be learnt and remembered, and how a model begins with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hotset.cache.controller import Controller
from hotset.cache.learning import PRIOR_TOKENS, hottest, prime
from hotset.cache.plan import Scope
from hotset.cache.warm_pin import AUTO_TOKENS
from hotset.errors import HotsetError
from hotset.models.keeping import Keeper, Learner
from hotset.policies import Grid
from hotset.profile import Profile
from hotset.profile.folder import check_writable, locate
from hotset.runtime.caching import CachingEngine
from hotset.shape import Budget, ExpertKey

if TYPE_CHECKING:
    from hotset.models.handle import Handle

LEARN_EVERY_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Which profile to begin with, which one to write, and what to pin."""

    profile: str | None = None
    learn: str | None = None
    learn_every_s: float = LEARN_EVERY_S
    prior_tokens: int = PRIOR_TOKENS
    allow_foreign: bool = False
    pin: str | None = None
    warm_pin: int | str = 0

    def __post_init__(self) -> None:
        if self.learn_every_s <= 0:
            raise HotsetError("a profile is saved every so many seconds: give more than 0")
        if self.prior_tokens < 0:
            raise HotsetError("a profile is worth so many tokens of evidence: give 0 or more")
        if self.pin is not None:
            pin_share(self.pin)
        _ = self.warm_pin_tokens

    @property
    def warm_pin_tokens(self) -> int:
        """The tokens to observe before anything is protected; 0 is never."""
        words = {"auto": AUTO_TOKENS, "off": 0}
        found = words.get(self.warm_pin, self.warm_pin) if isinstance(self.warm_pin, str) else self.warm_pin
        if isinstance(found, str) and found.isdigit():
            found = int(found)
        if not isinstance(found, int) or found < 0:
            raise HotsetError(f"--warm-pin takes a number of tokens, auto or off, not {self.warm_pin!r}")
        return found

    @property
    def source(self) -> str | None:
        """The profile to begin with: the one named, or the one that is learnt if there is one already."""
        if self.profile is None and self.learn is not None and locate(self.learn).exists():
            return self.learn
        return self.profile

    def read(self) -> Profile | None:
        """The profile to begin with; a file that is none is refused before a model is loaded."""
        return None if self.source is None else Profile.load(locate(self.source))


def begin_or_close(handle: Handle, learning: Learning, profile: Profile | None) -> None:
    """Begin with what was learnt; a model for which that is refused is not left half open."""
    try:
        begin(handle, learning, profile)
    except BaseException:
        handle.close()
        raise


def begin(handle: Handle, learning: Learning, profile: Profile | None) -> None:
    """Start warm, pin, and go on learning, as far as that was asked for."""
    if learning.learn is not None:
        keep_learning(handle, learning)
    if profile is not None:
        profile.check(handle.engine.shape, handle.fingerprint, allow_foreign=learning.allow_foreign)
        handle.profile = profile
    if not isinstance(handle.engine, CachingEngine):
        if profile is not None or learning.pin or learning.warm_pin_tokens:
            handle.remark("all experts are in memory: there is nothing to warm or to pin")
        return
    if profile is None:
        if learning.pin:
            raise HotsetError("--pin needs to know which experts are hot: name a profile, or pin while the model runs")
        return
    warm_start(handle.engine, profile, learning)


def warm_start(engine: CachingEngine, profile: Profile, learning: Learning) -> None:
    """Let all policies know what the profile knows, and fill the slots in the background."""
    for controller in engine.controllers():
        prime(controller, profile, learning.prior_tokens)
    pins = [] if learning.pin is None else hottest_share(engine.controller, profile.hotness(), learning.pin)
    engine.warm(hottest(profile), pins)


def keep_learning(handle: Handle, learning: Learning) -> None:
    """Write a profile every few minutes and when the model is closed."""
    path = locate(str(learning.learn))
    keeper = Keeper(handle.engine, handle.fingerprint, path, allow_foreign=learning.allow_foreign)
    check_writable(path)
    handle.observe()
    learner = Learner(keeper, learning.learn_every_s, handle.remark)
    handle.on_close(learner.stop)


def pin_share(text: str) -> Budget:
    """Read how much to pin: "20%" of the slots, or "64 slots"."""
    share = Budget.parse(text)
    if share.size_bytes is not None:
        raise HotsetError(f'pins are a share of the cache ("20%") or a number of slots ("64 slots"), not "{text}"')
    return share


def hottest_share(controller: Controller, heat: Grid, text: str) -> list[ExpertKey]:
    """The hottest experts for a share of the slots: of every layer its share, or of the pool as it comes."""
    share, plan = pin_share(text), controller.plan
    if plan.scope is Scope.POOL:
        total = share.slots if share.slots is not None else int((share.fraction or 0) * plan.cached)
        return _best(heat.reshape(-1), total, plan.shape.experts)
    per_layer = plan.per_layer()
    if share.slots is not None:
        counts: Sequence[int] = [share.slots // plan.shape.layers] * plan.shape.layers
    else:
        counts = [int((share.fraction or 0) * size + 1e-9) for size in per_layer]
    return [
        ExpertKey(layer, key.expert)
        for layer, count in enumerate(counts)
        for key in _best(heat[layer], count, plan.shape.experts)
    ]


def _best(heat: Grid, count: int, experts: int) -> list[ExpertKey]:
    order = np.argsort(-heat, kind="stable")[:count]
    return [ExpertKey(*divmod(int(place), experts)) for place in order if heat[place] > 0]
