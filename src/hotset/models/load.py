"""`hotset.load`: an ordinary transformers model whose experts come and go under a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hotset.engine.build import KernelFactory
from hotset.errors import ModelError
from hotset.models.account import bound_library_caches
from hotset.models.catalog import EXPANDED
from hotset.models.connect import connect, watch
from hotset.models.deferred import DeferredExperts
from hotset.models.device import torch_device
from hotset.models.gguf_place import located
from hotset.models.learning import begin, read_profile
from hotset.models.memory_plan import MemoryPlanner
from hotset.models.pretrained import read_model
from hotset.options import Place, RunOptions, takes_options
from hotset.profile import Profile
from hotset.reading import odd_file


@takes_options(RunOptions, Place.LOAD, more="from_pretrained")
def load(model: str | Path, options: RunOptions) -> Any:
    """Load a model so that only a budget's worth of its experts is in memory; returns the transformers model.

    `model` is a folder, a hub id, or a GGUF file, also as "folder:file.gguf" or "org/name:file.gguf". Keywords that are
    no options below go to `from_pretrained`; with `output_loading_info=True` the result is a pair of the model and what
    the library says of its weights. A model's own code runs with `trust_remote_code=True` only.
    """
    return load_model(located(str(model)) or str(model), options, read_profile(options))


def load_model(model: str, options: RunOptions, profile: Profile | None, kernels: KernelFactory | None = None) -> Any:
    """Load a model that begins with a profile, or with nothing known; given kernels compute all experts in any case."""
    if (odd := odd_file(Path(model))) is not None:
        raise ModelError(f"{odd} is a pipe or a device, not a file: remove it from the model's folder")
    bound_library_caches()
    planner = MemoryPlanner(options)

    def keep(*found: Any) -> bool:
        return planner(*found) and kernels is None

    deferred = DeferredExperts(keep=keep, device_kind=torch_device(options.device).type, experts=options.experts)
    keywords = {
        "dtype": options.dtype,
        "trust_remote_code": options.trust_remote_code,  # the library's default is to ask
        **(options.from_pretrained or {}),
    }
    found = read_model(model, deferred, keywords, options.auto_class)
    loaded = found[0] if isinstance(found, tuple) else found
    if deferred.moe_layers is None or deferred.catalog is None or planner.plan is None:
        raise ModelError(f"{model} was not loaded from safetensors files: save it once with save_pretrained")
    loaded.to(torch_device(options.device))
    if deferred.kept:
        handle = watch(loaded, deferred.moe_layers, planner.plan, options, profile)
    else:
        handle = connect(
            loaded,
            deferred.moe_layers,
            deferred.catalog,
            planner.plan,
            options,
            kernels=kernels,
            placeholders=deferred.placeholders,
            profile=profile,
        )
    if expanded := deferred.catalog.meta.get(EXPANDED):
        handle.warn(
            f"experts that are stored as {expanded} are expanded to plain numbers whenever they are read; "
            "hotset pack --experts dense does it once for all"
        )
    handle.warn(*planner.notes)
    try:
        begin(handle, options)
    except BaseException:
        handle.close()  # a model for which that is refused is not left half open
        raise
    return found
