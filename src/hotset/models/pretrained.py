"""What transformers' `from_pretrained` is given for a folder, a hub id or a GGUF file, when experts stay behind."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hotset.errors import ModelError
from hotset.models.deferred import DeferredExperts, load_without_experts
from hotset.models.gguf_checkpoint import GgufCheckpoint
from hotset.models.layers import MoeLayer
from hotset.models.own_code import refusing_own_code
from hotset.models.packed import check_if_packed
from hotset.models.plausible import refuse_absurd_config
from hotset.models.quantised import own_reading
from hotset.store import Catalog


def read_model(place: str, deferred: DeferredExperts, keywords: dict[str, Any], auto_class: Any = None) -> Any:
    """Have transformers load a model without its experts; what is found out about those is in `deferred` then."""
    from transformers import AutoModelForCausalLM

    chosen = auto_class or AutoModelForCausalLM
    gguf = deferred.gguf = GgufCheckpoint.open(place)
    if gguf is not None:
        own = {"config": gguf.config, "state_dict": {}}  # the weights come from `deferred`
        with load_without_experts(deferred):
            return _class_of(chosen, gguf.config).from_pretrained(None, **(keywords | own))
    refuse_absurd_config(place)
    with refusing_own_code(place):
        extra = own_reading(place, keywords)
        checked = check_if_packed(Path(place))
        with load_without_experts(deferred):
            found = chosen.from_pretrained(place, **(extra | keywords))
    if checked is None:  # it may be a pack in the hub's cache
        check_if_packed(deferred.files[0].parent if deferred.files else None)
    return found


class _InspectedError(Exception):
    """All that was asked for is known."""


class Inspected(NamedTuple):
    """A model without the memory of its experts, where these lie, and what else was found out."""

    model: Any
    moe_layers: list[MoeLayer]
    catalog: Catalog
    deferred: DeferredExperts


def inspect_checkpoint(
    place: str,
    keywords: dict[str, Any],
    deferred: DeferredExperts | None = None,
    auto_class: Any = None,
    *,
    load_rest: bool = False,
) -> Inspected:
    """Begin to load a model, and stop where its experts are known and no weight has been read, or load the rest."""
    found: list[Inspected] = []
    deferred = deferred or DeferredExperts(keep=lambda *_: False)

    def stop(model: Any, moe_layers: list[MoeLayer], catalog: Catalog) -> bool:
        found.append(Inspected(model, moe_layers, catalog, deferred))
        if not load_rest:
            raise _InspectedError
        return False

    deferred.keep = stop
    with suppress(_InspectedError):
        read_model(place, deferred, {"dtype": "auto"} | keywords, auto_class)
    if not found:
        raise ModelError(f"{place} has no safetensors files: save it once with save_pretrained")
    return found[0]


def _class_of(chosen: Any, config: Any) -> Any:
    """The class that one of transformers' automatic classes would choose; it looks for code in a folder, otherwise."""
    classes = getattr(chosen, "_model_mapping", None)
    found = chosen if classes is None else classes[type(config)]
    return found[0] if isinstance(found, tuple) else found
