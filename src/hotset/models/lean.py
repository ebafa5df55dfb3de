"""Loading a model without its experts: their parameters are taken out just before the weights are read.

The loader of transformers changes globals of its own while it builds a model (the default type, `tie_weights`), so
that loads of two threads spoil each other: hotset's go one after another. What hotset itself replaces serves every
thread, and does what transformers does for each that is not loading through hotset.
"""

from __future__ import annotations

import threading
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
from hotset.models.shell import Shell, strip
from hotset.models.site import Site
from hotset.models.sites import find_sites
from hotset.store import Catalog
from hotset.store.inside import check_inside, folder_of
from hotset.store.packed import is_packed

_LOADING = threading.RLock()
_CURRENT: ContextVar[LeanLoad | None] = ContextVar("hotset_lean_load", default=None)
_IGNORED = "_keys_to_ignore_on_load_unexpected"
_EXPERT_KEYS = {"expert", r"mlp\.(w1|v1|w2)", r"mlp\.(input|output)_linear"}
_MISSING = object()


@dataclass
class LeanLoad:
    """What was found out while loading."""

    keep: Callable[[Any, list[Site], Catalog], bool]  # whether to load everything after all
    sites: list[Site] | None = None
    catalog: Catalog | None = None
    kept: bool = False
    shells: list[Shell] = field(default_factory=list)
    folder: Path | None = None  # of the files that were loaded
    report: Any = None  # what transformers says of missing and mismatched weights
    _before: tuple[Any, Any] | None = None  # the model, and which keys it ignored before

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
            catalog = CatalogBuilder(model, sources).build(sites)
        self.sites, self.catalog = sites, catalog
        self.kept = self.keep(model, sites, catalog)
        if not self.kept:
            self.shells = strip(model, sites)
            self._before = model, vars(model).get(_IGNORED, _MISSING)
            setattr(model, _IGNORED, set(getattr(model, _IGNORED, None) or ()) | _EXPERT_KEYS)

    def put_back(self) -> None:
        """Let the model ignore the keys again that it ignored before: later loads into it are not ours."""
        if self._before is not None:
            model, ignored = self._before
            vars(model).pop(_IGNORED, None)
            if ignored is not _MISSING:
                setattr(model, _IGNORED, ignored)
            self._before = None


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
    with _LOADING, _loader_replaced():
        current = _CURRENT.set(lean)
        try:
            yield
        except RuntimeError as error:
            refuse_misfits(lean.report, error)
            raise
        finally:
            _CURRENT.reset(current)
            lean.put_back()
    refuse_incomplete(lean.report)


@contextmanager
def _loader_replaced() -> Iterator[None]:
    """While open, transformers asks the calling thread's lean load, if it has one, to load a model's weights."""
    from transformers import PreTrainedModel

    loader: Any = PreTrainedModel
    descriptor = vars(loader)["_load_pretrained_model"]
    stock = descriptor.__func__

    def load_weights(model: Any, state_dict: Any, files: Any, config: Any, *rest: Any, **more: Any) -> Any:
        lean = _CURRENT.get()
        if lean is None or lean.sites is not None or state_dict is not None or not files:
            return stock(model, state_dict, files, config, *rest, **more)
        lean.take_out(model, files, config.weight_mapping or [])
        found = stock(model, state_dict, files, config, *rest, **more)
        lean.report = found[0]
        return found

    try:
        loader._load_pretrained_model = staticmethod(load_weights)
        yield
    finally:
        loader._load_pretrained_model = descriptor
