"""What keeps the device from driving decode steps: everything that may, in one place."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from hotset.cache.plan import Scope
from hotset.engine.kernels.spec import ExpertSpec
from hotset.forecasts import Forecast
from hotset.policies import Policy
from hotset.shape import ModelShape
from hotset.store import SlotLayout

MAX_TOKENS = 8
"""Tokens of a step, one of each sequence; more are faster on the host path, which groups rows by expert."""

LATE_HAS_RUN = False
"""Whether admission `late`, and `nextuse`, which has it, were run on a GPU: until then the host serves them there.

Set it once `make gpu-test` passes with it set; tests do so for themselves.
"""


class DeviceSupport:
    """Answers whether the device can drive a model: each reason against it in words."""

    @staticmethod
    def check(
        policy: Policy,
        scope: Scope,
        layers: Iterable[tuple[ExpertSpec, SlotLayout]],
        *,
        page_locked: bool = True,
        ram_holds_all: bool = True,
        forecast: Forecast | None = None,
        encoder_decoder: bool = False,
    ) -> list[str]:
        """All reasons against it, the one to be told first; none if the device can.

        `forecast` is one that was asked for by name.
        """
        if find_spec("triton") is None:
            return ["Triton is missing"]
        from hotset.engine.device.plan import Plan
        from hotset.engine.kernels.triton_experts import TritonExperts

        found = [
            "the decode steps of encoder-decoder models are not captured" if encoder_decoder else None,
            None if page_locked else "the system refused to lock the RAM tier's memory",
            None if ram_holds_all else "the RAM tier does not hold all experts: give it more by --host-memory",
            None if forecast is None or forecast.on_device else f"the forecast {forecast.name} is made by the host",
            Plan.supports(policy, scope),
        ]
        for spec, layout in layers:
            found.append("the model's own code calls its experts one by one" if spec.looped else None)
            found.append(TritonExperts.supports(spec, layout))
        return [reason for reason in dict.fromkeys(found) if reason is not None]

    @staticmethod
    def check_batch(tokens: int, shape: ModelShape, staging: int, policy: Policy | None = None) -> list[str]:
        """All reasons against steps of so many tokens: all that they may miss must find a row."""
        found = []
        if policy is not None and policy.needs_routes:
            found += _too_few_streams(tokens, shape, policy)
        if tokens > MAX_TOKENS:
            found.append(f"steps of more than {MAX_TOKENS} tokens are faster when the host groups them by expert")
        needed = min(tokens * shape.top_k, shape.experts)
        if needed > staging:
            found.append(
                f"an event of {tokens} tokens may need {needed} staging rows, and there are {staging}: load the model "
                f"with staging={needed} or more, on the command line by --staging {needed}"
            )
        return found


def _too_few_streams(tokens: int, shape: ModelShape, policy: Policy) -> list[str]:
    """Why a policy that follows each request cannot follow so many on the device."""
    from hotset.engine.device.policies import find, names  # needs Triton

    most = find(policy.name).most_tokens if policy.name in names() else None
    if most is None or most(policy, shape) >= tokens:
        return []
    return [f"{policy.name} follows {most(policy, shape)} requests, and where more share them the host drives"]
