"""What a plan is made for: a recorded trace, a profile, a workload of the reference model, or a generic one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.analysis.planner.localities import GENERIC, LOCALITIES, PARAMETERS
from hotset.errors import HotsetError, TraceError
from hotset.profile import Profile
from hotset.reference import trace as reference_trace
from hotset.reference import workloads
from hotset.shape import ModelShape
from hotset.trace import Phase, Trace
from hotset.trace.synth import SynthConfig, synthesise

SCALED_SPREAD, GENERIC_SPREAD, PROFILE_SPREAD = 0.35, 0.4, 0.4
"""How far misses may be off, as a share, where they are not those of a recorded trace (docs/results/planner.md)."""
_REQUESTS, _PROMPT_TOKENS, _NEW_TOKENS = 32, 24, 40
_SEED = 0


@dataclass(frozen=True, eq=False)
class Workload:
    """The routing that is replayed, and how much misses may differ from what the replay says."""

    name: str
    trace: Trace
    misses_spread: float = 0.0
    note: str | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether a model chose these experts in this order."""
        return self.misses_spread == 0.0


def recorded(trace: Trace, shape: ModelShape, name: str) -> Workload:
    """A trace of the model itself."""
    found = trace.shape
    if (found.layers, found.experts, found.top_k) != (shape.layers, shape.experts, shape.top_k):
        raise TraceError(
            f"{name} is of {_words(found)}, and the model has {_words(shape)}: give a trace of this model, "
            "or leave it out"
        )
    return Workload(name, trace)


def generic(shape: ModelShape) -> Workload:
    """The locality of the reference model's 14 domains, in the model's shape."""
    note = (
        "no --trace, --profile or --like: hits are those of a generic workload, with the locality of the reference "
        "model's 14 domains, and the interval is wide; hotset trace record and --trace make it narrow"
    )
    return Workload("generic", synthetic(GENERIC, shape), GENERIC_SPREAD, note)


def like(name: str, shape: ModelShape) -> Workload:
    """A workload of the reference model: its own trace where the shapes agree, else its locality in this shape."""
    if name not in workloads():
        raise HotsetError(f'--like knows no "{name:.40}": there are {", ".join(workloads())}')
    trace = reference_trace(name)
    if (trace.shape.layers, trace.shape.experts, trace.shape.top_k) == (shape.layers, shape.experts, shape.top_k):
        return Workload(name, trace)
    note = f"--like {name}: the locality of that workload in this model's shape, so the interval is wide"
    return Workload(f"like {name}", synthetic(name, shape), SCALED_SPREAD, note)


def profiled(path: Path, shape: ModelShape) -> Workload:
    """A workload drawn from what a profile knows: who is used how often, request by request where it kept that."""
    profile = Profile.load(path)
    if (profile.shape.layers, profile.shape.experts) != (shape.layers, shape.experts):
        raise HotsetError(
            f"the profile is of {profile.shape.layers} x {profile.shape.experts} experts, and the model has "
            f"{shape.layers} x {shape.experts}: give a profile of this model"
        )
    if not profile.uses.any():
        raise HotsetError(f"{path} has counted nothing yet: run the model with --learn first")
    note = "a profile knows how often experts are used and not in which order, so the interval is wide"
    return Workload(f"profile {path.stem}", _drawn(_rates(profile), shape), PROFILE_SPREAD, note)


def _words(shape: ModelShape) -> str:
    return f"{shape.layers} x {shape.experts} experts, top {shape.top_k}"


def synthetic(name: str, shape: ModelShape) -> Trace:
    """Routing as local as a workload of the reference model, for a model of any shape."""
    own: dict[str, Any] = dict(zip(PARAMETERS, LOCALITIES[name], strict=True))
    return synthesise(
        SynthConfig(
            layers=shape.layers, experts=shape.experts, top_k=shape.top_k, requests=_REQUESTS,
            prompt_tokens=_PROMPT_TOKENS, new_tokens=_NEW_TOKENS, topics=8, seed=_SEED, **own,
        )
    )  # fmt: skip


def _rates(profile: Profile) -> list[npt.NDArray[np.float64]]:
    """How often each expert is used, [layers, experts]: of each kept request, mixed with all of them, or of all."""
    overall = profile.hotness()
    if profile.matrices is None or not len(profile.matrices):
        return [overall]
    found = []
    for matrix in profile.matrices.each(profile.shape.experts):
        counts = matrix.sum(axis=0).astype(float)
        mass = counts.sum(axis=1, keepdims=True)
        own = np.divide(counts, mass, out=np.zeros_like(counts), where=mass > 0) * profile.shape.top_k
        found.append(0.8 * own + 0.2 * overall)
    return found


def _drawn(rates: list[npt.NDArray[np.float64]], shape: ModelShape) -> Trace:
    """Tokens whose experts are drawn by these rates, with the generic correlation between neighbours."""
    random = np.random.default_rng(_SEED)
    stay = LOCALITIES[GENERIC][PARAMETERS.index("locality")]
    tokens, experts = _REQUESTS * _NEW_TOKENS, []
    for request in range(_REQUESTS):
        logits = np.log(np.maximum(rates[request % len(rates)], 1e-4))
        noise = random.gumbel(size=(_NEW_TOKENS, *logits.shape))
        for token in range(1, _NEW_TOKENS):
            again = random.random(logits.shape) < stay  # the draw of the token before, now and then
            noise[token] = np.where(again, noise[token - 1], noise[token])
        experts.append(np.argsort(-(logits + noise), axis=2)[:, :, : shape.top_k])
    return Trace(
        shape=shape,
        experts=np.concatenate(experts).astype(np.int16),
        request=np.repeat(np.arange(_REQUESTS, dtype=np.int32), _NEW_TOKENS),
        step=np.arange(tokens, dtype=np.int32),
        phase=np.full(tokens, Phase.DECODE, np.uint8),
    )
