"""Puts the parts of an engine together, for a CPU or for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from hotset.cache.controller import Controller
from hotset.cache.monitor import CacheMonitor
from hotset.cache.plan import SlotPlan
from hotset.engine.arena import Arena, page_lock
from hotset.engine.driver import Stock, StockDriver
from hotset.engine.engine import Engine, Offload
from hotset.engine.guard import Guard
from hotset.engine.host.copies import CopyLoader, CopyMover, CopyPrefetch
from hotset.engine.host.driver import HostDriver
from hotset.engine.host.prefetcher import Predictor, Prefetcher
from hotset.engine.host.streams import Streams
from hotset.engine.kernels import ExpertKernels, ExpertSpec, gpu_kernels
from hotset.engine.kernels.cpu import PerExpertKernels
from hotset.engine.preload import DiskLoader, Preloader
from hotset.engine.slots import SlotCache
from hotset.engine.stats import EngineStats
from hotset.engine.tiers import RamTier
from hotset.policies import Policy
from hotset.prefetch import Driver, PrefetchPlan, plan_prefetch
from hotset.store import Catalog, SlotLayout
from hotset.transfer import Readers
from hotset.transfer.disk import DiskMover, DiskPrefetch

if TYPE_CHECKING:
    from hotset.engine.device.variant import Predict

KernelFactory = Callable[[Arena, SlotLayout, ExpertSpec, int], ExpertKernels]
"""Makes the kernels of one layer from an arena, the layout of its rows, what an expert computes, and top_k."""


def per_expert_kernels(arena: Arena, layout: SlotLayout, spec: ExpertSpec, _: int) -> ExpertKernels:
    """The kernels of one layer on a CPU."""
    return PerExpertKernels(arena, layout, spec)


def cpu_engine(
    controller: Controller,
    catalog: Catalog,
    specs: Sequence[ExpertSpec],
    *,
    kernels: KernelFactory = per_expert_kernels,
    threads: int = 0,
    force: bool = False,
    predictor: Predictor | None = None,
    prefetch: PrefetchPlan | None = None,
    monitor: CacheMonitor | None = None,
) -> Engine:
    """Slots in ordinary memory with a disk behind them; prefetch by the rules of a CPU where no others are given."""
    cache = SlotCache(controller)
    guard, stats = Guard(cache), EngineStats(controller)
    arena = Arena.in_ram(cache.num_rows, catalog.slot_bytes, force=force)
    readers = Readers(catalog, arena.rows().__getitem__, threads=threads)
    mover = DiskMover(readers, cache.staging)
    rules = prefetch or _rules(Driver.CPU, controller)
    prefetcher = Prefetcher(rules, cache, DiskPrefetch(readers), predictor) if rules.rows else None
    top_k, layers = controller.plan.shape.top_k, zip(catalog.layers, specs, strict=True)
    of_layers = [kernels(arena, source.layout, spec, top_k) for source, spec in layers]
    driver = HostDriver(cache, mover, of_layers, prefetcher, catalog, stats, guard)
    preloader = Preloader(cache, DiskLoader(cache, catalog, readers, guard), guard, catalog.slot_bytes)
    offload = Offload(catalog, arena, mover, driver, prefetcher, preloader)
    return Engine(torch.device("cpu"), cache, stats, guard, driver, offload, monitor)


def gpu_engine(
    controller: Controller,
    catalog: Catalog,
    specs: Sequence[ExpertSpec],
    device: torch.device,
    host_plan: SlotPlan,
    host_policy: Policy,
    *,
    by_device: bool = False,
    predict: Predict | None = None,
    tier: RamTier | None = None,
    kernels: KernelFactory = gpu_kernels,
    threads: int = 0,
    force: bool = False,
    pinned: bool = False,
    predictor: Predictor | None = None,
    prefetch: PrefetchPlan | None = None,
    device_prefetch: PrefetchPlan | None = None,
    monitor: CacheMonitor | None = None,
) -> Engine:
    """Slots on a GPU with a RAM tier behind them, and a disk behind that; a `tier` that is there already is used.

    With `by_device` the device may drive decode steps; `predict` says what it prefetches, by the rules of
    `device_prefetch`. A host's are `prefetch`. Where none are given, they are those of `plan_prefetch`.
    """
    cache = SlotCache(controller)
    guard, stats = Guard(cache), EngineStats(controller)
    if tier is None:
        tier = RamTier(catalog, host_plan, host_policy, guard, threads=threads, force=force)
    arena = Arena.on_device(cache.num_rows, catalog.slot_bytes, device)
    mover = CopyMover(tier, arena, Streams(device), cache.staging)
    rules = prefetch or _rules(Driver.HOST, controller)
    prefetcher = Prefetcher(rules, cache, CopyPrefetch(mover), predictor) if rules.rows else None
    top_k, layers = controller.plan.shape.top_k, zip(catalog.layers, specs, strict=True)
    of_layers = [kernels(arena, source.layout, spec, top_k) for source, spec in layers]
    driver = HostDriver(cache, mover, of_layers, prefetcher, catalog, stats, guard)
    preloader = Preloader(cache, CopyLoader(cache, mover, guard), guard, catalog.slot_bytes)
    pinned = pinned or (device.type == "cuda" and page_lock(tier.arena, device))
    offload = Offload(catalog, arena, mover, driver, prefetcher, preloader, tier, pinned)
    decode = None
    if by_device:
        from hotset.engine.device.decode import DeviceDecode  # needs Triton

        device_rules = device_prefetch or _rules(Driver.DEVICE, controller)
        decode = DeviceDecode(device, cache, stats, guard, offload, device_rules, predict)
    return Engine(device, cache, stats, guard, driver, offload, monitor, decode)


def _rules(driver: Driver, controller: Controller) -> PrefetchPlan:
    """The rules by which a driver prefetches into the rows that a cache has for it."""
    return plan_prefetch(driver, controller.plan.shape, rows=controller.plan.prefetch_rows)


def stock_engine(controller: Controller, implementations: Sequence[Stock]) -> Engine:
    """All experts resident, computed by transformers' own implementation."""
    shape = controller.plan.shape
    controller.preload(np.ones((shape.layers, shape.experts)))
    cache = SlotCache(controller)
    guard, stats = Guard(cache), EngineStats(controller)
    driver = StockDriver(controller, implementations, stats, guard)
    return Engine(torch.device("cpu"), cache, stats, guard, driver)
