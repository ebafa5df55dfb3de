"""How a model starts warm from a profile, and goes on learning into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hotset.cache.controller import Controller
from hotset.cache.learning import hottest, prime
from hotset.cache.plan import Scope
from hotset.cache.warm_pin import AUTO_TOKENS
from hotset.errors import HotsetError
from hotset.models.profile_writer import ProfileAutosave, ProfileWriter
from hotset.options import RunOptions
from hotset.options.run import AUTO, OFF, pin_share
from hotset.policies import Grid
from hotset.profile import Profile
from hotset.profile.folder import check_writable, locate
from hotset.shape import ExpertKey

if TYPE_CHECKING:
    from hotset.models.handle import Handle


def read_profile(options: RunOptions) -> Profile | None:
    """The profile to begin with: the one named, or the one that is learnt if it exists already.

    What cannot be read, or written later, is refused before a model is loaded.
    """
    source = options.profile
    if options.learn is not None:
        check_writable(locate(str(options.learn)))
        if source is None and locate(str(options.learn)).exists():
            source = options.learn
    if source is None and options.pin is not None:
        raise HotsetError("--pin needs to know which experts are hot: name a --profile, or pin while the model runs")
    return None if source is None else Profile.load(locate(str(source)))


def warm_pin_tokens(options: RunOptions) -> int:
    """The tokens to observe before anything is protected; 0 is never."""
    words = {AUTO: AUTO_TOKENS, OFF: 0}
    return words[str(options.warm_pin)] if options.warm_pin in words else int(options.warm_pin)


def begin(handle: Handle, options: RunOptions) -> None:
    """Start warm from the handle's profile, pin, and go on learning, as far as that was asked for."""
    profile = handle.profile
    if options.learn is not None:
        keep_learning(handle, options)
    if profile is not None:
        profile.check(handle.engine.shape, handle.fingerprint, allow_foreign=options.allow_foreign)
    if handle.engine.offload is None:
        if profile is not None or options.pin or warm_pin_tokens(options):
            handle.warn("all experts are in memory: there is nothing to warm or to pin")
        return
    if profile is not None:  # all policies know what it knows, and the slots are filled in the background
        for tier in handle.engine.tiers:
            prime(tier.controller, profile, options.prior_tokens)
        pins = [] if options.pin is None else hottest_share(handle.engine.controller, profile.hotness(), options.pin)
        handle.engine.preload(hottest(profile), pins)


def keep_learning(handle: Handle, options: RunOptions) -> None:
    """Write a profile every few minutes and when the model is closed."""
    path = locate(str(options.learn))
    writer = ProfileWriter(handle.engine, handle.fingerprint, path, allow_foreign=options.allow_foreign)
    check_writable(path)
    handle.observe()
    autosave = ProfileAutosave(writer, 60 * options.learn_every, handle.warn)
    handle.patches.add(autosave.stop)


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
