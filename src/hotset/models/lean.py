"""Loading a model without its experts: their parameters are taken out just before the weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotset.models.catalog import CatalogBuilder
from hotset.models.checkpoint import ParameterSource, parameter_sources
from hotset.models.complete import refuse_incomplete, refuse_misfits
from hotset.models.packed import open_fitting
from hotset.models.patches import Undo, ignore_keys, weights_loaded_by
from hotset.models.shell import Shell, strip
from hotset.models.site import Site
from hotset.models.sites import find_sites
from hotset.store import Catalog
from hotset.store.inside import check_inside, folder_of
from hotset.store.packed import is_packed

_CURRENT: ContextVar[LeanLoad | None] = ContextVar("hotset_lean_load", default=None)
_EXPERT_KEYS = {"expert", r"mlp\.(w1|v1|w2)", r"mlp\.(input|output)_linear"}


@dataclass
class LeanLoad:
    """What was found out while loading."""

    keep: Callable[[Any, list[Site], Catalog], bool]  # whether to load everything after all
    sites: list[Site] | None = None
    catalog: Catalog | None = None
    kept: bool = False
    shells: list[Shell] = field(default_factory=list)
    device_kind: str = "cpu"  # that experts are computed on
    folder: Path | None = None  # of the files that were loaded
    report: Any = None  # what transformers says of missing and mismatched weights
    heed_keys: Undo = list  # ends the passing over of the experts' keys

    def take_out(self, model: Any, files: Sequence[str], mapping: Sequence[Any]) -> None:
        """Find the experts and their bytes, and take their parameters out of the model, unless all are kept."""
        paths = [Path(file) for file in files]
        check_inside(folder_of(model.name_or_path, paths), paths)
        sites = find_sites(model)
        wanted = {name for site in sites for name in site.parameters()}
        remember_shapes(model, wanted)
        folder = self.folder = Path(files[0]).parent
        if is_packed(folder):
            catalog = open_fitting(folder, sites, model._hotset_dtypes)
        else:
            sources = parameter_sources(model, files, mapping, wanted)
            drop_spare_rows(model, sites, sources)
            catalog = CatalogBuilder(model, sources, self.device_kind).build(sites)
        self.sites, self.catalog = sites, catalog
        encoded = any(layer.layout.matrices for layer in catalog.layers)
        self.kept = self.keep(model, sites, catalog) and not encoded  # transformers does not read these
        if not self.kept:
            self.shells = strip(model, sites)
            self.heed_keys = ignore_keys(model, _EXPERT_KEYS)


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
    """While open, the next model that this thread loads leaves its experts where they are.

    Weights that are missing or do not fit raise ModelError at the end: transformers would draw them at random.
    """
    with weights_loaded_by(_load_weights):
        current = _CURRENT.set(lean)
        try:
            yield
        except RuntimeError as error:
            refuse_misfits(lean.report, error)
            raise
        finally:
            _CURRENT.reset(current)
            lean.heed_keys()
    refuse_incomplete(lean.report)


def _load_weights(stock: Any, model: Any, state_dict: Any, files: Any, config: Any, *rest: Any, **more: Any) -> Any:
    """Load a model's weights, those of the calling thread's lean load without its experts, others as transformers."""
    lean = _CURRENT.get()
    if lean is None or lean.sites is not None or state_dict is not None or not files:
        return stock(model, state_dict, files, config, *rest, **more)
    lean.take_out(model, files, config.weight_mapping or [])
    found = stock(model, state_dict, files, config, *rest, **more)
    lean.report = found[0]
    return found
