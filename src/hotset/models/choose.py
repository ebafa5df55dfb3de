"""Which device, how many slots on it and in host memory, and whether all this is needed at all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from hotset.cache.plan import Scope, SlotPlan
from hotset.errors import BudgetError, HotsetError
from hotset.forecasts import parse as parse_forecast
from hotset.models.budget import AUTO, OFF, free_bytes_for_experts, plan_slots, shape_of, slots_for_guesses
from hotset.models.learning import Learning
from hotset.models.site import Site
from hotset.policies import Policy, parse
from hotset.runtime.machine import available_memory_bytes
from hotset.shape import Budget, format_size
from hotset.store import Catalog

HOST_SHARE = 0.8
"""The share of free host memory that the RAM tier takes when nobody says how much."""
HOST_STAGING = 8
ENGINES = (AUTO, "host", "device")
"""Who drives a GPU: the device where it can, the host always can, or the device or nobody."""


@dataclass
class Settings:
    """What a person chose, and the device that this comes to."""

    memory: str | Budget = AUTO
    host_memory: str | Budget = AUTO
    policy: str = "blend"
    host_policy: str = "blend"
    device: str = AUTO
    scope: str = "layer"
    staging: int | None = None
    threads: int = 0
    learning: Learning = field(default_factory=Learning)
    prefetch: str = AUTO  # off, auto, or a forecast
    engine: str = AUTO  # auto, or who drives a GPU: "host" or "device"
    switch: bool = False  # between the policy and lru, whichever does better

    def __post_init__(self) -> None:
        if self.policy == AUTO:
            self.policy, self.switch = "blend", True
        for name in (self.policy, self.host_policy):
            _live(name)
        if self.prefetch not in (OFF, AUTO):
            parse_forecast(self.prefetch)
        if self.engine not in ENGINES:
            raise HotsetError(f"the engine is {', '.join(ENGINES[:-1])} or {ENGINES[-1]}, not {self.engine!r}")
        if self.scope not in tuple(Scope):
            raise HotsetError(f'the scope must be "layer" or "pool", not {self.scope!r}')

    def torch_device(self) -> torch.device:
        """The device to compute on."""
        if self.device == AUTO:
            return (
                torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
            )
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise HotsetError(f"no device is called {self.device!r}: use auto, cpu, cuda or cuda:N") from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise HotsetError("no CUDA device is here: leave --device out, or use --device cpu")
        if device.type not in ("cpu", "cuda", "mps"):
            raise HotsetError(f"hotset does not run on {device.type}: use cpu or cuda")
        return device


def _live(name: str) -> Policy:
    """A policy that can be used while a model runs."""
    policy = parse(name)
    if policy.offline:
        raise HotsetError(f"{policy.name} needs the future: use it in hotset simulate, and another policy here")
    return policy


@dataclass
class Chooser:
    """Decides, once shapes and sizes are known, how many slots there will be."""

    settings: Settings
    plan: SlotPlan | None = None
    notes: list[str] = field(default_factory=list)

    def __call__(self, model: Any, sites: list[Site], catalog: Catalog) -> bool:
        """Plan the slots; true if every expert fits, so that the model is better loaded as it is."""
        settings, shape = self.settings, shape_of(sites, catalog)
        device = settings.torch_device()
        if settings.engine == "device" and device.type != "cuda":
            raise HotsetError(f"--engine device is for a CUDA GPU, and this model runs on {device.type}: leave it out")
        by_device = device.type == "cuda" and settings.engine != "host"
        self.plan = plan_slots(
            settings.memory,
            shape,
            scope=Scope(settings.scope),
            staging=settings.staging,
            free_bytes=free_bytes_for_experts(model, device),
            on_gpu=device.type != "cpu",
            by_device=by_device,
            ahead=0 if settings.prefetch == OFF else slots_for_guesses(shape, by_device),
        )
        if warning := self.plan.warning(parse(settings.policy).name):
            self.notes.append(warning)
        stock = all(site.stock for site in sites) and catalog.digests is None  # transformers cannot read packed blocks
        if self.plan.cached < shape.total_experts or not stock:
            return False
        self.notes.append(f"all {shape.total_experts} experts fit: the model runs as transformers made it")
        return True


def host_plan(settings: Settings, plan: SlotPlan) -> SlotPlan:
    """The slots of the RAM tier: all experts if they fit, for a copy from RAM is far cheaper than one from disk."""
    shape = plan.shape
    size = shape.expert_bytes or 1
    staging = HOST_STAGING
    if settings.host_memory == AUTO:
        room = int(available_memory_bytes() * HOST_SHARE)
        slots = min(room // size - staging, shape.total_experts)
    else:
        wished = settings.host_memory
        budget = wished if isinstance(wished, Budget) else Budget.parse(wished)
        slots = budget.slots_for(shape, staging)
    if slots < shape.layers:
        raise BudgetError(
            f"the RAM tier would hold {max(slots, 0)} experts: give it at least {shape.layers} slots, "
            f"or {format_size((shape.layers + staging) * size)}, by --host-memory"
        )
    return SlotPlan(shape, slots, Scope.LAYER, 0 if slots >= shape.total_experts else staging)
