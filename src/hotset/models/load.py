"""`hotset.load`: an ordinary transformers model whose experts come and go under a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hotset import policies
from hotset.cache.controller import Controller
from hotset.cache.plan import Scope, SlotPlan
from hotset.errors import ModelError
from hotset.models.budget import free_bytes_for_experts, plan_slots, shape_of
from hotset.models.handle import Handle
from hotset.models.lean import LeanLoad, lean_loading
from hotset.models.passes import PassWatcher
from hotset.models.site import Forward, Site
from hotset.runtime.cpu import CpuEngine
from hotset.runtime.engine import Engine, refuse_training
from hotset.shape import Budget
from hotset.store import Catalog


@dataclass
class Settings:
    """What a person chose."""

    memory: str | Budget = "auto"
    policy: str = "blend"
    device: str = "auto"
    scope: str = "layer"
    staging: int | None = None
    threads: int = 0


def load(
    model: str,
    *,
    memory: str | Budget = "auto",
    policy: str = "blend",
    device: str = "auto",
    scope: str = "layer",
    staging: int | None = None,
    threads: int = 0,
    auto_class: Any = None,
    **options: Any,
) -> Any:
    """Load a model so that only a budget's worth of its experts is in memory; returns the transformers model.

    `model` is a folder or a hub id; `options` go to `from_pretrained`.
    """
    from transformers import AutoModelForCausalLM

    settings = Settings(memory, policy, device, scope, staging, threads)
    chooser = Chooser(settings)
    lean = LeanLoad(keep=chooser)
    with lean_loading(lean):
        loaded = (auto_class or AutoModelForCausalLM).from_pretrained(model, **_defaults(options))
    if lean.sites is None or lean.catalog is None or chooser.plan is None:
        raise ModelError(f"{model} was not loaded from safetensors files: save it once with save_pretrained")
    connect(loaded, lean.sites, lean.catalog, chooser.plan, settings)
    return loaded


class Chooser:
    """Decides, once shapes and sizes are known, how many slots there will be."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.plan: SlotPlan | None = None

    def __call__(self, model: Any, sites: list[Site], catalog: Catalog) -> bool:
        """Plan the slots; true if every expert fits, so that the model is better loaded as it is."""
        shape = shape_of(sites, catalog)
        self.plan = plan_slots(
            self.settings.memory,
            shape,
            scope=Scope(self.settings.scope),
            staging=self.settings.staging,
            free_bytes=free_bytes_for_experts(model, "cpu"),
        )
        return False


def connect(model: Any, sites: list[Site], catalog: Catalog, plan: SlotPlan, settings: Settings) -> Handle:
    """Put an engine behind the experts of a model."""
    controller = Controller(plan, policies.parse(settings.policy))
    engine = CpuEngine(controller, catalog, [site.math for site in sites], threads=settings.threads)
    watcher = PassWatcher(engine)
    handle = Handle(model, engine, sites, watcher)
    for layer, site in enumerate(sites):
        handle.on_close(site.install(_forward(engine, layer, site)))
    handle.on_close(watcher.attach(model))
    model.hotset = handle
    return handle


def _forward(engine: Engine, layer: int, site: Site) -> Forward:
    def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        refuse_training(site.module)
        return engine.forward(layer, hidden, index, weights)

    uncompiled: Forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    return uncompiled


def _defaults(options: dict[str, Any]) -> dict[str, Any]:
    return {"dtype": "auto"} | options
