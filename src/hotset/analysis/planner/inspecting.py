"""A model as its checkpoint has it, or as its config alone describes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hotset.analysis.planner.model import BFLOAT16, MORE_SPECS, SPECS, PlannedModel
from hotset.engine.kernels.spec import ExpertSpec
from hotset.errors import ModelError
from hotset.formats import weight_of
from hotset.generation.errors import LOADING, translate_errors
from hotset.generation.text_model import locate, need_transformers
from hotset.models.account import work_bytes
from hotset.models.budget import shape_of
from hotset.models.find_layers import find_moe_layers
from hotset.models.footprint import Footprint
from hotset.models.layers import LayerPart, MoeLayer
from hotset.models.pretrained import inspect_checkpoint
from hotset.store import SlotLayout
from hotset.store.packed import is_packed

_CPU = torch.device("cpu")
_CONFIG = "config.json"
_MAX_CONFIG_BYTES = 16 << 20
_METHODS = {"mxfp4": "mxfp4", "fp8": "fp8"}
"""The `quant_method` of configs whose experts have a size that can be computed without the weights."""


def inspect_model(model: str | None, context: int, trust_remote_code: bool = False) -> PlannedModel:
    """The sizes of a folder with a checkpoint, a GGUF file, a hub id, a folder with a config alone, or a config."""
    need_transformers()
    config = None if model is None else _config_alone(Path(model).expanduser())
    if config is not None:
        return _from_config(str(model), config, context, trust_remote_code)
    place = locate(model)
    with translate_errors(place, "read the model", LOADING):
        found = inspect_checkpoint(place, {"trust_remote_code": trust_remote_code})
    shape, source = shape_of(found.moe_layers, found.catalog), found.catalog.layers[0]
    return PlannedModel(
        name="reference" if model is None else model,
        layers=shape.layers,
        experts=shape.experts,
        top_k=shape.top_k,
        matrices=stored_matrices(source.layout, found.moe_layers[0].spec),
        own=own_precision(source.layout),
        own_bytes=shape.expert_bytes,
        there=True,
        packed=is_packed(found.catalog.files[0].parent),
        **_rest(found.model, shape.top_k, context, {*getattr(found.model, "_hotset_shapes", ())}),
    )


def _config_alone(path: Path) -> Path | None:
    """The config of a model without weights, if that is what the path leads to."""
    if path.is_file() and path.suffix == ".json":
        return path
    weights = ("*.safetensors", "*.gguf", "*.bin")
    if (path / _CONFIG).is_file() and not any(any(path.glob(pattern)) for pattern in weights):
        return path / _CONFIG
    return None


def _from_config(name: str, path: Path, context: int, trust_remote_code: bool) -> PlannedModel:
    """The sizes that a config states: the model is made without memory."""
    method = _quant_method(path)
    with translate_errors(str(path), "read the config", "check it, or describe the model by --shape"):
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        config.quantization_config = None
        with torch.device("meta"):
            made: Any = AutoModelForCausalLM
            model = made.from_config(config, dtype=torch.bfloat16, trust_remote_code=trust_remote_code)
        moe_layers = find_moe_layers(model)
    first = moe_layers[0]
    parameters = {name for each in moe_layers for name in each.parameters()}
    return PlannedModel(
        name=str(Path(name).parent) if name.endswith(".json") else name,
        layers=len(moe_layers),
        experts=max(each.experts for each in moe_layers),
        top_k=max(each.top_k for each in moe_layers),
        matrices=_declared_matrices(first),
        own=method or BFLOAT16,
        **_rest(model, first.top_k, context, parameters),
    )


def _quant_method(path: Path) -> str | None:
    """The precision that a config says the experts have, if they are not plain numbers."""
    try:
        document = json.loads(path.read_bytes()[:_MAX_CONFIG_BYTES])
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not JSON: give the config.json of a model, or describe it by --shape") from None
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        raise ModelError(f"{path} names no model_type: give the config.json of a model, or describe it by --shape")
    quantised = document.get("quantization_config")
    if not isinstance(quantised, dict):
        return None
    method = str(quantised.get("quant_method", ""))
    if method not in _METHODS:
        raise ModelError(
            f'{path} says quant_method "{method:.40}", whose sizes lie in the weights: download the model, '
            "or describe it by --shape"
        )
    return _METHODS[method]


def _rest(model: Any, top_k: int, context: int, experts: set[str]) -> dict[str, Any]:
    """What is no expert: weights, what a token reads of them, and what a context and a step take."""
    tied = {*getattr(model, "all_tied_weights_keys", ())}
    own = [(name, parameter) for name, parameter in model.named_parameters() if name not in experts]
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in own if name not in tied}
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    shared = any(parameter is embedding for name, parameter in own if name in tied)
    looked_up = 0 if embedding is None or tied or shared else embedding.numel() * embedding.element_size()
    footprint, dense = Footprint.of(model, top_k), sum(sizes.values())
    text = model.config.get_text_config()
    return {
        "all_layers": int(getattr(text, "num_hidden_layers", 0) or 1),
        "dense_bytes": dense,
        "read_bytes": max(dense - looked_up, 0),
        "context_bytes": footprint.cached_bytes(context),
        "work_bytes": work_bytes(footprint, _CPU, context),
    }


def stored_matrices(layout: SlotLayout, spec: ExpertSpec) -> tuple[tuple[int, int], ...]:
    """Outputs and inputs of an expert's matrices, as they lie in a slot."""
    found = (
        weight_of(layout, spec.up, transposed=spec.up_transposed),
        weight_of(layout, spec.down, transposed=spec.down_transposed),
    )
    return tuple((weight.outputs, weight.inputs) for weight in found)


def _declared_matrices(moe_layer: MoeLayer) -> tuple[tuple[int, int], ...]:
    spec, parts = moe_layer.spec, {part.name: part for part in moe_layer.parts}
    return (_sides(parts[spec.up], spec.up_transposed), _sides(parts[spec.down], spec.down_transposed))


def _sides(part: LayerPart, transposed: bool) -> tuple[int, int]:
    first, second = part.shape[-2:]
    return (second, first) if transposed else (first, second)


def own_precision(layout: SlotLayout) -> str:
    """The precision of an expert in a word: of its format, or of its numbers."""
    specs: Sequence[str] = [matrix.format for matrix in layout.matrices]
    if not specs:
        return layout.parts[0].dtype
    names = {spec: name for name, spec in (SPECS | MORE_SPECS).items()}
    return names.get(specs[0]) or specs[0].partition(":")[0]
