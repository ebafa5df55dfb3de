"""`hotset.load`: an ordinary transformers model whose experts come and go under a budget."""

from __future__ import annotations

from typing import Any

from hotset.errors import ModelError
from hotset.models.budget import AUTO
from hotset.models.choose import Chooser, Settings
from hotset.models.connect import connect, watch
from hotset.models.lean import LeanLoad, lean_loading
from hotset.models.quantised import dequantising
from hotset.shape import Budget


def load(
    model: str,
    *,
    memory: str | Budget = AUTO,
    policy: str = "blend",
    device: str = AUTO,
    host_memory: str | Budget = AUTO,
    host_policy: str = "blend",
    scope: str = "layer",
    staging: int | None = None,
    threads: int = 0,
    auto_class: Any = None,
    **options: Any,
) -> Any:
    """Load a model so that only a budget's worth of its experts is in memory; returns the transformers model.

    `model` is a folder or a hub id; `memory` is a size ("8GiB"), a share of the experts ("25%"), a number of slots or
    "auto"; `options` go to `from_pretrained`.
    """
    from transformers import AutoModelForCausalLM

    settings = Settings(memory, host_memory, policy, host_policy, device, scope, staging, threads)
    chooser = Chooser(settings)
    lean = LeanLoad(keep=chooser)
    extra, notes = dequantising(str(model), options)
    with lean_loading(lean):
        chosen = auto_class or AutoModelForCausalLM
        loaded: Any = chosen.from_pretrained(str(model), **({"dtype": "auto"} | extra | options))
    if lean.sites is None or lean.catalog is None or chooser.plan is None:
        raise ModelError(f"{model} was not loaded from safetensors files: save it once with save_pretrained")
    loaded.to(settings.torch_device())
    if lean.kept:
        handle = watch(loaded, lean.sites, chooser.plan, settings)
    else:
        handle = connect(loaded, lean.sites, lean.catalog, chooser.plan, settings)
        handle.shells = lean.shells
    handle.remark(*notes, *chooser.notes)
    return loaded
