"""Which bytes of a checkpoint make the pruned one: found from its headers, and checked against both models' shapes.

The same model is built twice without memory, with as many experts as it has and with as many as are kept. What differs
between the two is what must be cut, and nothing else is; whatever differs in another way is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from hotset.analysis.prune_choice import Kept
from hotset.errors import ModelError
from hotset.models.checkpoint import (
    ParameterSource,
    StoredKey,
    parameter_sources,
    read_headers,
    stored_keys,
    stored_tensors,
)
from hotset.models.deferred import DeferredExperts
from hotset.models.encoded import EncodedTensor
from hotset.models.find_layers import find_moe_layers
from hotset.models.layers import MoeLayer
from hotset.models.pretrained import Inspected, inspect_checkpoint
from hotset.store.header import StoredTensor
from hotset.store.layout import ITEM_BYTES

Shapes = dict[str, tuple[int, ...]]


class ByteRange(NamedTuple):
    """Some bytes of a file, counted from its start."""

    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CutTensor(StoredTensor):
    """A tensor of the pruned checkpoint: some ranges of the bytes of a stored one, end to end."""

    ranges: tuple[ByteRange, ...] = ()


class Cut(NamedTuple):
    """What is kept of a stored tensor: these indices of one axis, in blocks of so many."""

    axis: int
    kept: tuple[int, ...]
    block: int = 1


class _MappedExperts(DeferredExperts):
    """Remembers also how transformers maps stored tensors to parameters."""

    mapping: Sequence[Any] = ()

    def detach_experts(self, model: Any, files: Sequence[str], mapping: Sequence[Any]) -> None:
        self.mapping = mapping
        super().detach_experts(model, files, mapping)


class Checkpoint:
    """A checkpoint as it is on disk: its model without memory, and which stored tensors each parameter is made of."""

    def __init__(self, place: str, *, trust_remote_code: bool = False) -> None:
        deferred = _MappedExperts(keep=lambda *_: False)
        self.found: Inspected = inspect_checkpoint(place, {"trust_remote_code": trust_remote_code}, deferred)
        self.model, self.moe_layers, self.files = self.found.model, self.found.moe_layers, deferred.files
        names = [str(file) for file in self.files]
        self.raw = read_headers(names)
        self.stored = stored_tensors(self.model, names)  # those of each encoded matrix in one
        self.keys: list[StoredKey] = stored_keys(self.model, self.stored, deferred.mapping)
        self.shapes = shapes_of(self.model)

    def raw_names(self, key: str) -> tuple[str, ...]:
        """The tensors in the files that a stored one is made of: several where it is in a weight format."""
        tensor = self.stored[key]
        if not isinstance(tensor, EncodedTensor):
            return (key,)
        return (*(part.name for part in tensor.parts), *tensor.beside)

    @property
    def experts(self) -> int:
        """The experts of each layer."""
        found = {moe_layer.experts for moe_layer in self.moe_layers}
        if len(found) != 1:
            raise ModelError("the layers of this model have different numbers of experts: it cannot be pruned")
        return found.pop()


def shapes_of(model: Any) -> Shapes:
    """The shapes of all that a model loads."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def smaller_model(model: Any, config: dict[str, Any], experts: int) -> Any:
    """The same model without memory under a changed config, in which every layer has so many experts."""
    from transformers import AutoConfig

    with TemporaryDirectory(prefix="hotset-") as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        changed = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        smaller = type(model)(changed)
    if {moe_layer.experts for moe_layer in find_moe_layers(smaller)} != {experts}:
        raise ModelError("the config does not say how many experts a layer has in a way that hotset knows: not pruned")
    return smaller


class PrunePlan:
    """What every tensor of the pruned checkpoint is made of, by its name, in the order of the original's files."""

    def __init__(self, checkpoint: Checkpoint, smaller: Shapes, kept: Kept) -> None:
        self._checkpoint, self._smaller, self._kept = checkpoint, smaller, kept
        self._renamed: dict[str, str] = {}
        self._cuts: dict[str, Cut] = {}
        self._dropped: set[str] = set()
        self._expert_parameters = {name for layer in checkpoint.moe_layers for name in layer.parameters()}
        if set(smaller) != set(checkpoint.shapes):
            raise ModelError("a model of this family with fewer experts has other tensors: it cannot be pruned")
        for number, moe_layer in enumerate(checkpoint.moe_layers):
            self._plan_experts(moe_layer, kept[number])
        self._plan_routers()
        self.unused = tuple(
            name
            for key, targets, _, _ in checkpoint.keys
            if not any(target in checkpoint.shapes for target in targets)
            for name in checkpoint.raw_names(key)
        )
        self.tensors: dict[str, StoredTensor] = dict(self._written())

    def _plan_experts(self, moe_layer: MoeLayer, kept: tuple[int, ...]) -> None:
        wanted = set(moe_layer.parameters())
        sources = parameter_sources(self._checkpoint.stored, self._checkpoint.keys, wanted)
        for name, source in sources.items():
            was, now = self._checkpoint.shapes[name], self._smaller[name]
            if was[0] * len(kept) != now[0] * moe_layer.experts or was[1:] != now[1:]:
                raise _not_understood(name)
            for tensors in source.tensors.values():
                self._plan_source(moe_layer, name, source, tensors, kept)

    def _plan_source(
        self,
        moe_layer: MoeLayer,
        name: str,
        source: ParameterSource,
        tensors: Sequence[StoredTensor],
        kept: tuple[int, ...],
    ) -> None:
        """The stored tensors of one expert parameter: one of each expert, or one of all."""
        if source.converter is not None and len(tensors) == moe_layer.experts:
            self._number_anew([tensor.name for tensor in tensors], kept)
            return
        rows = self._checkpoint.shapes[name][0]
        if len(tensors) != 1 or not tensors[0].shape or tensors[0].shape[0] not in (rows, moe_layer.experts):
            raise _not_understood(name)
        block = tensors[0].shape[0] // moe_layer.experts
        if block > 1 and source.converter is not None:
            raise _not_understood(name)
        for raw in self._checkpoint.raw_names(tensors[0].name):
            if self._checkpoint.raw[raw].shape[:1] != tensors[0].shape[:1]:
                raise _not_understood(raw)
            self._cut(raw, Cut(0, kept, block))

    def _number_anew(self, names: Sequence[str], kept: tuple[int, ...]) -> None:
        """Of tensors with one name for each expert, give those that stay their new number, and drop the others."""
        at, numbers = _counting_place(names), {old: new for new, old in enumerate(kept)}
        for old, key in enumerate(names):
            for name in self._checkpoint.raw_names(key):
                words = name.split(".")
                if words[at : at + 1] != [str(old)]:
                    raise _not_understood(name)
                if old not in numbers:
                    self._dropped.add(name)
                    continue
                words[at] = str(numbers[old])
                self._renamed[name] = ".".join(words)

    def _plan_routers(self) -> None:
        """What else has a row for each expert."""
        shapes = self._checkpoint.shapes
        changed = {name for name, shape in shapes.items() if self._smaller[name] != shape} - self._expert_parameters
        held: set[str] = set()
        for key, targets, _, converter in self._checkpoint.keys:
            for target in targets:
                if target not in changed:
                    continue
                if converter is not None or self._checkpoint.raw_names(key) != (key,):
                    raise _not_understood(key)
                layer = self._layer_of(target)
                experts = self._checkpoint.moe_layers[layer].experts
                axis = _axis(shapes[target], self._smaller[target], experts, len(self._kept[layer]))
                if axis is None:
                    raise _not_understood(key)
                held.add(target)
                self._cut(key, Cut(_stored_axis(self._checkpoint.stored[key], shapes[target], axis), self._kept[layer]))
        if absent := sorted(changed - held):
            raise ModelError(f"the checkpoint does not hold {absent[0]}: it is incomplete, or of another model")

    def _layer_of(self, name: str) -> int:
        """The MoE layer that a router's tensor belongs to."""
        parents = [
            (len(prefix), number)
            for number, moe_layer in enumerate(self._checkpoint.moe_layers)
            for prefix in (moe_layer.name, moe_layer.name.rpartition(".")[0])
            if prefix and name.startswith(f"{prefix}.")
        ]
        if not parents:
            raise _not_understood(name)
        return max(parents)[1]

    def _cut(self, key: str, cut: Cut) -> None:
        if self._cuts.setdefault(key, cut) != cut:
            raise _not_understood(key)

    def _written(self) -> Iterator[tuple[str, StoredTensor]]:
        order = {str(file): number for number, file in enumerate(self._checkpoint.files)}
        stored = sorted(self._checkpoint.raw.items(), key=lambda item: (order[str(item[1].file)], item[1].offset))
        left_out = self._dropped | set(self.unused)
        for key, tensor in stored:
            if key in left_out:
                continue
            cut = self._cuts.get(key)
            yield self._renamed.get(key, key), tensor if cut is None else cut_tensor(tensor, cut)


def cut_tensor(tensor: StoredTensor, cut: Cut) -> CutTensor:
    """Some indices of one axis of a stored tensor, as ranges of its bytes."""
    axis, kept, block = cut
    inner = prod(tensor.shape[axis + 1 :]) * ITEM_BYTES[tensor.dtype] * block
    outer, step = prod(tensor.shape[:axis]), prod(tensor.shape[axis:]) * ITEM_BYTES[tensor.dtype]
    places = (tensor.offset + begin * step + index * inner for begin in range(outer) for index in kept)
    ranges = tuple(_joined(ByteRange(place, inner) for place in places))
    shape = (*tensor.shape[:axis], len(kept) * block, *tensor.shape[axis + 1 :])
    size = sum(each.size_bytes for each in ranges)
    return CutTensor(tensor.file, tensor.dtype, shape, tensor.offset, size, tensor.name, ranges)


def _joined(ranges: Iterable[ByteRange]) -> Iterator[ByteRange]:
    """Ranges with those that follow each other in one."""
    last: ByteRange | None = None
    for each in ranges:
        if last is not None and last.offset + last.size_bytes == each.offset:
            last = ByteRange(last.offset, last.size_bytes + each.size_bytes)
            continue
        if last is not None:
            yield last
        last = each
    if last is not None:
        yield last


def _axis(was: tuple[int, ...], now: tuple[int, ...], experts: int, kept: int) -> int | None:
    """The one axis that has an index for each expert."""
    differing = [n for n, sides in enumerate(zip(was, now, strict=False)) if sides[0] != sides[1]]
    right = len(was) == len(now) and len(differing) == 1
    return differing[0] if right and (was[differing[0]], now[differing[0]]) == (experts, kept) else None


def _stored_axis(tensor: StoredTensor, shape: tuple[int, ...], axis: int) -> int:
    """The same axis of the stored tensor, which may have sides of one index more or less."""
    if tensor.shape == shape:
        return axis
    places = [n for n, side in enumerate(tensor.shape) if side == shape[axis]]
    if len(places) != 1 or prod(tensor.shape) != prod(shape) or prod(shape[:axis]) != prod(tensor.shape[: places[0]]):
        raise _not_understood(tensor.name)
    return places[0]


def _counting_place(names: Sequence[str]) -> int:
    """The word of dotted names that counts them, the only one by which they differ."""
    words = [name.split(".") for name in names]
    if len({len(each) for each in words}) == 1:
        places = [n for n in range(len(words[0])) if len({each[n] for each in words}) > 1]
        if len(places) == 1:
            return places[0]
    raise _not_understood(names[0])


def _not_understood(name: str) -> ModelError:
    return ModelError(
        f"{name} is stored in a way that hotset cannot cut by expert: load the model with transformers, save it with "
        "save_pretrained, and prune that"
    )
