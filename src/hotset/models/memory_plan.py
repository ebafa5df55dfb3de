"""Which device, how many slots on it and in host memory, and whether all this is needed at all."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hotset.cache.plan import Scope, SlotPlan
from hotset.engine.memory import available_memory_bytes
from hotset.errors import BudgetError, HotsetError
from hotset.models.account import (
    LIBRARIES_BYTES,
    Account,
    compile_ahead,
    decoding_bytes,
    reading_bytes,
    take_account,
)
from hotset.models.budget import plan_slots, shape_of
from hotset.models.catalog import STORED_AS
from hotset.models.device import torch_device
from hotset.models.layers import MoeLayer
from hotset.options import RunOptions
from hotset.options.run import AUTO, OFF, DriverChoice
from hotset.policies import parse
from hotset.prefetch import Driver, PrefetchPlan, plan_prefetch
from hotset.shape import Budget, ModelShape, format_size
from hotset.store import Catalog

HOST_SHARE = 0.8
"""The share of free host memory that the RAM tier takes when no size is given."""
HOST_STAGING = 8


@dataclass
class MemoryPlanner:
    """Decides, once shapes and sizes are known, how many slots there will be."""

    options: RunOptions
    loaded: bool = False  # the whole model is in memory already
    plan: SlotPlan | None = None
    notes: list[str] = field(default_factory=list)

    def __call__(self, model: Any, moe_layers: list[MoeLayer], catalog: Catalog) -> bool:
        """Plan the slots; true if every expert fits, so that the model is better loaded as it is."""
        options, shape = self.options, shape_of(moe_layers, catalog)
        device = torch_device(options.device)
        if options.engine == DriverChoice.DEVICE and device.type != "cuda":
            raise HotsetError(f"--engine device is for a CUDA GPU, and this model runs on {device.type}: leave it out")
        by_device = device.type == "cuda" and options.engine != DriverChoice.HOST
        driver = Driver.DEVICE if by_device else Driver.CPU if device.type == "cpu" else Driver.HOST
        account = self._account(model, shape, catalog, device, by_device)
        self.plan = plan_slots(
            options.memory,
            shape,
            scope=Scope(options.scope),
            staging=options.staging,
            free_bytes=account.expert_bytes,
            on_gpu=device.type != "cpu",
            by_device=by_device,
            prefetch_rows=0 if options.prefetch == OFF else prefetch_plan(options, driver, shape).rows,
        )
        if warning := self.plan.warning(parse(options.policy_on(device.type)).name):
            self.notes.append(warning)
        plain = catalog.digests is None and not catalog.meta.get(STORED_AS)  # transformers reads no other
        stock = all(moe_layer.stock for moe_layer in moe_layers) and plain
        whole = stock and self.plan.cached >= shape.total_experts
        if whole and self.loaded:
            return self._keep(shape)  # nothing more is taken
        self._check(account)
        if not whole or not self._can_be_loaded_whole(model, account):
            return False
        return self._keep(shape)

    def _keep(self, shape: ModelShape) -> bool:
        self.notes.append(f"all {shape.total_experts} experts fit: the model runs as transformers made it")
        return True

    def _account(
        self, model: Any, shape: ModelShape, catalog: Catalog, device: torch.device, by_device: bool
    ) -> Account:
        """What is free and what is needed; where memory is short, after all code is there that takes some of it."""
        options = self.options
        take = partial(
            take_account,
            model,
            device,
            shape.top_k,
            context=options.context,
            by_device=by_device,
            loaded=self.loaded,
            expert_work_bytes=decoding_bytes(catalog, device)
            + (reading_bytes(catalog, options.threads) if device.type == "cpu" else 0),
        )
        account = take()
        if device.type == "cpu" and account.expert_bytes < 2 * shape.total_experts * (shape.expert_bytes or 0):
            compile_ahead(options.policy_on(device.type))
            account = take()
        return account

    def _check(self, account: Account) -> None:
        memory = self.options.memory
        if memory == AUTO or self.options.force or self.plan is None:
            return
        account.check(self.plan, memory if isinstance(memory, Budget) else Budget.parse(memory))

    def _can_be_loaded_whole(self, model: Any, account: Account) -> bool:
        """Whether transformers can load all experts: it holds the pieces of one parameter beside the parameter."""
        shapes, dtypes = model._hotset_shapes, model._hotset_dtypes
        sizes = [math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()]
        return self.options.force or sum(sizes) + max(sizes) <= account.expert_bytes


def prefetch_plan(options: RunOptions, driver: Driver, shape: ModelShape, rows: int | None = None) -> PrefetchPlan:
    """By which rules a driver of a live model prefetches; `rows` once a budget has paid for some."""
    return plan_prefetch(driver, shape, rows=rows, trial=options.prefetch == AUTO)


def host_plan(options: RunOptions, plan: SlotPlan) -> SlotPlan:
    """The slots of the RAM tier: all experts if they fit, for a copy from RAM is far cheaper than one from disk."""
    shape = plan.shape
    size = shape.expert_bytes or 1
    staging = HOST_STAGING
    if options.host_memory == AUTO:
        room = int(available_memory_bytes() * HOST_SHARE)
        slots = min(room // size - staging, shape.total_experts)
    else:
        asked = options.host_memory
        budget = asked if isinstance(asked, Budget) else Budget.parse(asked)
        slots = budget.slots_for(shape, staging)
        _check_host(slots + (0 if slots >= shape.total_experts else staging), budget, shape, options.force)
    if slots < shape.layers:
        raise BudgetError(
            f"the RAM tier would hold {max(slots, 0)} experts: give it at least {shape.layers} slots, "
            f"or {format_size((shape.layers + staging) * size)}, by --host-memory"
        )
    return SlotPlan(shape, slots, Scope.LAYER, 0 if slots >= shape.total_experts else staging)


def _check_host(slots: int, budget: Budget, shape: ModelShape, force: bool) -> None:
    """Refuse a RAM tier that memory cannot hold, and name the largest that it can."""
    free, size = max(available_memory_bytes() - LIBRARIES_BYTES, 0), shape.expert_bytes or 1
    if force or slots * size <= free:
        return
    most = int(free * HOST_SHARE)
    raise BudgetError(
        f"--host-memory {budget} needs {format_size(slots * size)} and {format_size(free)} are free: the largest that "
        f"works is --host-memory {most >> 20}MiB; --force tries all the same"
    )
