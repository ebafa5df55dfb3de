"""Loading a model without its experts: their parameters are taken out just before the weights are read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotset.models.catalog import CatalogBuilder
from hotset.models.checkpoint import ParameterSource, parameter_sources
from hotset.models.packed import open_fitting
from hotset.models.shell import Shell, strip
from hotset.models.site import Site
from hotset.models.sites import find_sites
from hotset.store import Catalog
from hotset.store.packed import is_packed

_PATCHING = threading.Lock()


@dataclass
class LeanLoad:
    """What was found out while loading."""

    keep: Callable[[Any, list[Site], Catalog], bool]  # whether to load everything after all
    sites: list[Site] | None = None
    catalog: Catalog | None = None
    kept: bool = False
    shells: list[Shell] = field(default_factory=list)

    def take_out(self, model: Any, files: Sequence[str], mapping: Sequence[Any]) -> None:
        """Find the experts and their bytes, and take their parameters out of the model, unless all are kept."""
        sites = find_sites(model)
        wanted = {name for site in sites for name in site.parameters()}
        remember_shapes(model, wanted)
        folder = Path(files[0]).parent
        if is_packed(folder):
            catalog = open_fitting(folder, sites, model._hotset_dtypes)
        else:
            sources = parameter_sources(model, files, mapping, wanted)
            drop_spare_rows(model, sites, sources)
            catalog = CatalogBuilder(model, sources).build(sites)
        self.sites, self.catalog = sites, catalog
        self.kept = self.keep(model, sites, catalog)
        if not self.kept:
            self.shells = strip(model, sites)
            ignored = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
            model._keys_to_ignore_on_load_unexpected = ignored | {
                "expert",
                r"mlp\.(w1|v1|w2)",
                r"mlp\.(input|output)_linear",
            }


def remember_shapes(model: Any, names: set[str]) -> None:
    """Keep what later conversions and a detach need to know of parameters that will be gone."""
    found = {name: model.get_parameter(name) for name in names}
    model._hotset_shapes = {name: tuple(parameter.shape) for name, parameter in found.items()}
    model._hotset_dtypes = {name: parameter.dtype for name, parameter in found.items()}


def drop_spare_rows(model: Any, sites: Sequence[Site], sources: dict[str, ParameterSource]) -> None:
    """Forget stored tensors that are of a parameter but of none of its experts: LongCat's first matrix has some."""
    for site in sites:
        for name in site.parameters():
            for tensors in sources[name].tensors.values():
                if len(tensors) == model._hotset_shapes[name][0]:
                    del tensors[site.experts :]


@contextmanager
def lean_loading(lean: LeanLoad) -> Iterator[None]:
    """While open, the next model that transformers loads leaves its experts where they are."""
    from transformers import PreTrainedModel

    loader: Any = PreTrainedModel
    original = loader._load_pretrained_model

    def without_experts(model: Any, state_dict: Any, files: Any, config: Any, *rest: Any, **more: Any) -> Any:
        if lean.sites is None and state_dict is None and files:
            lean.take_out(model, files, config.weight_mapping or [])
        return original(model, state_dict, files, config, *rest, **more)

    with _PATCHING:
        loader._load_pretrained_model = staticmethod(without_experts)
        try:
            yield
        finally:
            loader._load_pretrained_model = staticmethod(original)
