"""Puts an engine behind the experts of a model, or only an observer where everything fits."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from hotset.cache.controller import Controller
from hotset.cache.monitor import CacheMonitor
from hotset.cache.plan import SlotPlan
from hotset.compiling import give_triton_a_folder
from hotset.engine.build import KernelFactory, cpu_engine, gpu_engine, per_expert_kernels, stock_engine
from hotset.engine.engine import Engine
from hotset.engine.gradients import differentiable, refuse_dropout
from hotset.engine.host.forecasting import ForecastPredictor
from hotset.engine.kernels import gpu_kernels
from hotset.errors import HotsetError
from hotset.forecasts import parse as parse_forecast
from hotset.models.account import chunk_bytes, free_bytes
from hotset.models.device import torch_device
from hotset.models.footprint import Footprint
from hotset.models.handle import Handle
from hotset.models.layers import Forward, MoeLayer
from hotset.models.learning import warm_pin_tokens
from hotset.models.memory_plan import host_plan, prefetch_plan
from hotset.models.notices import Notices
from hotset.models.patches import refuse_copies, refuse_in_children, refuse_saving, show_handle
from hotset.models.placeholders import Placeholder
from hotset.models.prompt_chunks import PromptChunks
from hotset.models.routers import Routers
from hotset.models.routing_hook import RoutingHook
from hotset.models.tracker import StepTracker
from hotset.options import RunOptions
from hotset.options.run import AUTO, OFF, DriverChoice
from hotset.policies import parse
from hotset.prefetch import Driver, PrefetchPlan
from hotset.profile import Profile
from hotset.store import Catalog


def connect(
    model: Any,
    moe_layers: list[MoeLayer],
    catalog: Catalog,
    plan: SlotPlan,
    options: RunOptions,
    *,
    kernels: KernelFactory | None = None,
    placeholders: list[Placeholder],
    profile: Profile | None,
) -> Handle:
    """Serve the experts of a model from slots, by kernels that suit the device or by those given."""
    notices = Notices()
    engine = make_engine(model, catalog, moe_layers, plan, options, notices, kernels)
    known: Any = {"notices": notices, "placeholders": placeholders, "profile": profile}
    handle = connect_engine(model, moe_layers, engine, prompt_chunks(model, engine, options), **known)
    try:
        drive_by_device(model, handle, options)
    except BaseException:
        handle.close()  # no caller knows of its threads and memory yet
        handle.patches.lift()
        raise
    if engine.device.type == "cuda" and engine.offload is not None and not engine.offload.pinned:
        handle.warn("the system refused to lock the RAM tier's memory, so copies are slower: raise ulimit -l")
    return handle


def connect_engine(
    model: Any, moe_layers: list[MoeLayer], engine: Engine, chunks: PromptChunks | None = None, **known: Any
) -> Handle:
    """Send the calls of a model's experts to an engine; `known` is what the handle is told beside."""
    handle = _handle(Handle(model, engine, moe_layers, StepTracker(engine), **known), model, chunks)
    for layer, moe_layer in enumerate(moe_layers):
        forward = _forward(engine, handle.tracker, layer, moe_layer)
        handle.patches.add(moe_layer.install(forward), until_whole=True)  # a closed engine refuses by itself
    handle.patches.add(refuse_in_children(model, engine.guard.owner), until_whole=True)
    handle.patches.add(refuse_saving(model))
    return handle


def watch(
    model: Any, moe_layers: list[MoeLayer], plan: SlotPlan, options: RunOptions, profile: Profile | None
) -> Handle:
    """Leave a model as it is, and only count its passes and record its routing when asked."""
    stock = [moe_layer.stock for moe_layer in moe_layers if moe_layer.stock is not None]
    engine = stock_engine(Controller(plan, parse(options.policy_on(torch_device(options.device).type))), stock)
    tracker = StepTracker(engine)
    routing_hook = RoutingHook(
        lambda: [
            moe_layer.install(_forward(engine, tracker, layer, moe_layer)) for layer, moe_layer in enumerate(moe_layers)
        ]
    )
    handle = Handle(model, engine, moe_layers, tracker, routing_hook=routing_hook, profile=profile)
    return _handle(handle, model, prompt_chunks(model, engine, options))


def make_engine(
    model: Any,
    catalog: Catalog,
    moe_layers: Sequence[MoeLayer],
    plan: SlotPlan,
    options: RunOptions,
    notices: Notices,
    kernels: KernelFactory | None = None,
) -> Engine:
    """The engine for the device."""
    device = torch_device(options.device)
    controller = Controller(plan, parse(options.policy_on(device.type)))
    if options.policy == AUTO:
        notices.add(f"policy {controller.policy.name}, by auto; lru takes over where it does better")
    specs = [moe_layer.spec for moe_layer in moe_layers]
    drivers = (Driver.CPU if device.type == "cpu" else Driver.HOST, Driver.DEVICE)
    rules, device_rules = (prefetch_plan(options, driver, plan.shape, plan.prefetch_rows) for driver in drivers)
    predictor = make_predictor(model, moe_layers, controller, rules, options) if rules.rows else None
    monitor = CacheMonitor(
        controller, notices.add, switch=options.switches_policy, warm_pin_tokens=warm_pin_tokens(options)
    )
    shared: Any = {
        "threads": options.threads, "force": options.force, "predictor": predictor, "prefetch": rules,
        "monitor": monitor,
    }  # fmt: skip
    if device.type == "cpu":
        return cpu_engine(controller, catalog, specs, kernels=kernels or per_expert_kernels, **shared)
    if device.type == "cuda":
        give_triton_a_folder()
    by_device = options.engine != DriverChoice.HOST and device.type == "cuda" and find_spec("triton") is not None
    routers = Routers.of(model, moe_layers) if by_device and options.prefetch != OFF else None
    return gpu_engine(
        controller,
        catalog,
        specs,
        device,
        host_plan(options, plan),
        parse(options.host_policy),
        by_device=by_device,
        predict=None if routers is None else routers.scores,
        device_prefetch=device_rules,
        kernels=kernels or gpu_kernels,
        **shared,
    )


def drive_by_device(model: Any, handle: Handle, options: RunOptions) -> None:
    """Have decode steps captured and replayed, where that is possible; else say in a line why not."""
    engine, decode = handle.engine, handle.engine.device_decode
    if engine.device.type != "cuda" or options.engine == DriverChoice.HOST:
        return
    encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
    reasons = ["Triton is missing"]
    if decode is not None:
        reasons = decode.unsupported_reasons(encoder_decoder=encoder_decoder)
    if decode is not None and not reasons:
        from hotset.models.decode_graph import DecodeGraphs

        if decode.steps.parts.predict is None and engine.prefetcher is not None:
            engine.prefetcher.ignore_tokens()  # it goes on demand alone, and to ask for tokens is to wait for it
        decode.filler.start()
        graphs = DecodeGraphs(
            model,
            decode,
            handle.tracker,
            handle.static_caches,
            warn=handle.warn,
            demanded=options.engine == DriverChoice.DEVICE,
        )
        handle.patches.add(graphs.install())
    elif options.engine == DriverChoice.DEVICE:
        raise HotsetError(f"the device cannot drive this model: {reasons[0]}; leave --engine out, or use --engine host")
    else:
        handle.warn(f"the host drives the GPU, for {reasons[0]}")


def make_predictor(
    model: Any, moe_layers: Sequence[MoeLayer], controller: Controller, plan: PrefetchPlan, options: RunOptions
) -> ForecastPredictor:
    """What predicts for prefetch, by a plan: the forecast named, or the next layers' routers where that pays."""
    routers = Routers.of(model, moe_layers)
    named = options.prefetch != AUTO
    forecast = parse_forecast(options.prefetch if named else "gate" if routers is not None else "best")
    gate, slot_of = None if routers is None else routers.predict, controller.table.slot_of
    return ForecastPredictor(forecast, controller.plan.shape, plan, gate=gate, slot_of=slot_of)


def prompt_chunks(model: Any, engine: Engine, options: RunOptions) -> PromptChunks:
    """What splits long prompts, and refuses those that there is no memory for."""
    device = torch_device(options.device)
    return PromptChunks(
        Footprint.of(model, engine.shape.top_k),
        chunk_bytes(device),
        lambda: free_bytes(device) - (0 if engine.offload is None else engine.offload.untouched_bytes()),
        options.force,
    )


def _handle(handle: Handle, model: Any, chunks: PromptChunks | None) -> Handle:
    """Have a handle follow the calls of its model."""
    if chunks is not None:
        handle.patches.add(chunks.attach(model))  # before the tracker: to it every chunk is a step of its own
    handle.patches.add(handle.tracker.attach(model))
    handle.patches.add(refuse_copies(model), until_whole=True)
    handle.patches.add(show_handle(model, handle), until_whole=True)
    return handle


def _forward(engine: Engine, tracker: StepTracker, layer: int, moe_layer: MoeLayer) -> Forward:
    def serve(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        step = tracker.current()
        return step.driver.serve(step, layer, hidden, index, weights)

    def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if engine.offload is None:
            return serve(hidden, index, weights)  # a model that is whole runs on, whatever becomes of its engine
        engine.guard.check_usable()
        refuse_dropout(moe_layer.module)
        return differentiable(engine.offload.driver, layer, moe_layer.module, serve, (hidden, index, weights))

    uncompiled: Forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    return uncompiled
