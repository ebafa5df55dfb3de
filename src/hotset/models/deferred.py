"""Loading a model without its experts: their parameters are taken out just before the weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hotset.models.catalog import CatalogBuilder
from hotset.models.checkpoint import (
    ParameterSource,
    StoredKey,
    dtype_of,
    parameter_sources,
    stored_keys,
    stored_tensors,
)
from hotset.models.complete import refuse_incomplete, refuse_misfits, refuse_more_layers, refuse_unsaid_packing
from hotset.models.decoded_state import decoded_state, needs_decoding
from hotset.models.encoded import EncodedTensor
from hotset.models.find_layers import find_moe_layers
from hotset.models.gguf_checkpoint import GgufCheckpoint, converted_state
from hotset.models.layers import MoeLayer
from hotset.models.moments import Moments
from hotset.models.packed import open_fitting, refuse_expansion
from hotset.models.patches import Undo, ignore_keys, weights_loaded_by
from hotset.models.placeholders import Placeholder, install_placeholders
from hotset.models.plausible import refuse_no_numbers
from hotset.options.run import AUTO, DENSE
from hotset.store import Catalog
from hotset.store.header import StoredTensor
from hotset.store.inside import check_inside, folder_of
from hotset.store.packed import is_packed

_CURRENT: ContextVar[DeferredExperts | None] = ContextVar("hotset_lean_load", default=None)


@dataclass
class DeferredExperts:
    """What was found out while loading."""

    keep: Callable[[Any, list[MoeLayer], Catalog], bool]  # whether to load everything after all
    moe_layers: list[MoeLayer] | None = None
    catalog: Catalog | None = None
    kept: bool = False
    placeholders: list[Placeholder] = field(default_factory=list)
    device_kind: str = "cpu"  # that experts are computed on
    experts: str = AUTO  # as the checkpoint has them, as plain numbers ("dense"), or in a format to be made
    importance: Moments | None = None  # of the inputs of matrices whose format is made
    files: list[Path] = field(default_factory=list)  # that are loaded
    report: Any = None  # what transformers says of missing and mismatched weights
    restore_keys: Undo = list  # ends the passing over of the experts' keys
    gguf: GgufCheckpoint | None = None  # if the weights are in GGUF files
    stored: dict[str, StoredTensor] = field(default_factory=dict)  # if some weights beside the experts are decoded
    keys: list[StoredKey] = field(default_factory=list)
    expert_keys: set[str] = field(default_factory=set)
    unused: set[str] = field(default_factory=set)  # tensors beside those of encoded matrices

    def detach_experts(self, model: Any, files: Sequence[str], mapping: Sequence[Any]) -> None:
        """Find the experts and their bytes, and take their parameters out of the model, unless all are kept."""
        self.files = [Path(file) for file in files]
        if self.gguf is None:
            check_inside(folder_of(model.name_or_path, self.files), self.files)
        moe_layers = find_moe_layers(model)
        wanted = {name for moe_layer in moe_layers for name in moe_layer.parameters()}
        remember_shapes(model, wanted)
        folder = self.files[0].parent
        stored = stored_tensors(model, files) if self.gguf is None else self.gguf.stored(dtype_of(model))
        keys = stored_keys(model, stored, mapping if self.gguf is None else self.gguf.rules(model))
        if self.gguf is None:
            refuse_no_numbers(f"the config of {model.name_or_path or folder}", model.config.to_dict())
            refuse_unsaid_packing(model, stored)
        if self.gguf is not None or needs_decoding(model, stored, keys, wanted):
            self.stored, self.keys = stored, keys
        self.unused = {name for t in stored.values() if isinstance(t, EncodedTensor) for name in t.beside}
        if self.gguf is None and is_packed(folder):
            catalog = open_fitting(folder, moe_layers, model._hotset_dtypes)
            if self.experts == DENSE:
                refuse_expansion(catalog)
        else:
            sources = parameter_sources(stored, keys, wanted)
            drop_spare_rows(model, moe_layers, sources)
            catalog = CatalogBuilder(model, sources, self.device_kind, self.experts, self.importance).build(moe_layers)
            listed = [tensors for source in sources.values() for tensors in source.tensors.values()]
            self.expert_keys = {tensor.name for tensors in listed for tensor in tensors}
        refuse_more_layers(model, moe_layers, keys)
        self.moe_layers, self.catalog = moe_layers, catalog
        self.kept = self.keep(model, moe_layers, catalog)
        if not self.kept:
            self.placeholders = install_placeholders(model, moe_layers)
            self.restore_keys = ignore_keys(model, {keys for each in moe_layers for keys in each.ignored_keys})


def remember_shapes(model: Any, names: set[str]) -> None:
    """Keep what later conversions and a detach need to know of parameters that will be gone."""
    found = {name: model.get_parameter(name) for name in names}
    model._hotset_shapes = {name: tuple(parameter.shape) for name, parameter in found.items()}
    model._hotset_dtypes = {name: parameter.dtype for name, parameter in found.items()}


def drop_spare_rows(model: Any, moe_layers: Sequence[MoeLayer], sources: dict[str, ParameterSource]) -> None:
    """Forget stored tensors that are of a parameter but of none of its experts."""
    for moe_layer in moe_layers:
        for name in moe_layer.parameters():
            for tensors in sources[name].tensors.values():
                if len(tensors) == model._hotset_shapes[name][0]:
                    del tensors[moe_layer.experts :]


@contextmanager
def load_without_experts(deferred: DeferredExperts) -> Iterator[None]:
    """While open, the next model that this thread loads leaves its experts where they are.

    Weights that are missing or do not fit raise ModelError at the end: transformers would draw them at random.
    """
    with weights_loaded_by(_load_weights):
        current = _CURRENT.set(deferred)
        try:
            yield
        except RuntimeError as error:
            refuse_misfits(deferred.report, error)
            raise
        finally:
            _CURRENT.reset(current)
            deferred.restore_keys()
    refuse_incomplete(deferred.report)


def _load_weights(stock: Any, model: Any, state_dict: Any, files: Any, config: Any, *rest: Any, **more: Any) -> Any:
    """Load a model's weights, those of the calling thread's deferred load without experts, others as transformers."""
    deferred = _CURRENT.get()
    gguf = deferred.gguf if deferred is not None else None
    if deferred is None or deferred.moe_layers is not None or (gguf is None and (state_dict is not None or not files)):
        return stock(model, state_dict, files, config, *rest, **more)
    deferred.detach_experts(model, files or (gguf.files if gguf else []), config.weight_mapping or [])
    with ExitStack() as stack:
        if gguf is not None:
            experts = set() if deferred.kept else set(model._hotset_shapes)
            state_dict = converted_state(model, deferred.stored, deferred.keys, experts)
            config = replace(config, weight_mapping=[])  # it is applied already
        elif deferred.stored:
            left_out = set() if deferred.kept else deferred.expert_keys
            state_dict = stack.enter_context(decoded_state(deferred.stored, left_out))
        found = stock(model, state_dict, files, config, *rest, **more)
    deferred.report = found[0]
    return found
