"""`hotset pack`: a checkpoint rewritten so that every expert is one aligned block, ready to be used as it is read."""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotset.errors import HotsetError, ModelError
from hotset.models.checkpoint import read_headers
from hotset.models.deferred import DeferredExperts
from hotset.models.gguf_export import small_files_of, weights_of
from hotset.models.gguf_place import is_gguf, located
from hotset.models.moments import Calibration, Moments
from hotset.models.pack_files import packed_config, small_files, source_folder
from hotset.models.packed import dtype_name
from hotset.models.pretrained import Inspected, inspect_checkpoint
from hotset.options.run import AUTO, DENSE
from hotset.store import Catalog
from hotset.store.catalog import Bytes
from hotset.store.dense import INDEX_NAME, Shard, shard_index, shards_of
from hotset.store.digest import new_digest
from hotset.store.header import StoredTensor
from hotset.store.pack import Packer, tidy
from hotset.store.packed import is_packed, open_index, write_quality
from hotset.store.plan import PackKey, PackLayer, PackPlan
from hotset.store.verify import Progress
from hotset.transfer import Readers, ReadTransfer
from hotset.transfer.file import aligned_buffer
from hotset.transfer.reads import Load

MAX_READS = 8
MAX_READ_BYTES = 1 << 30
MADE = {"int8": "integer:bits=8", "int4": "integer:short=on", "mxfp4": "mxfp4"}
"""The formats that experts of plain numbers can be packed in; groups of 32."""
MOMENTS_FILE = "moments.safetensors"
"""What a calibration has come to, in the folder of a pack that is not finished."""


@dataclass(frozen=True, slots=True)
class PackReport:
    """What a pack came to."""

    folder: Path
    files: list[str]
    size_bytes: int
    experts: int
    digests: int
    resumed: int  # experts that an earlier, interrupted run had written
    seconds: float
    complete_already: bool = False
    quality: dict[str, Any] | None = None  # of a pack that was complete already


def pack(
    model: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    progress: Progress | None = None,
    auto_class: Any = None,
    trust_remote_code: bool = False,
    experts: str = AUTO,
    calibration: Calibration | None = None,
) -> PackReport:
    """Pack a checkpoint into a folder that loads like it; goes on with what an interrupted run has left.

    Experts stay in the checkpoint's own format, unless they are to be plain numbers ("dense"), or plain numbers are to
    become one of `MADE`; a calibration says which errors count then.
    """
    if experts not in (AUTO, DENSE, *MADE):
        raise HotsetError(f"experts are packed as {', '.join((AUTO, DENSE, *MADE))}, not {experts!r:.60}")
    model = located(str(model)) or model
    refuse_pack(str(model), Path(model), experts)
    began, target = time.perf_counter(), Path(out).absolute()
    if os.path.lexists(target) and not is_packed(target):
        raise HotsetError(f"{target} exists: choose another name for the pack, or remove it")
    chosen, moments = MADE.get(experts, experts), Moments()
    found = inspect_experts(
        str(model), dtype, auto_class, trust_remote_code=trust_remote_code, experts=chosen, importance=moments
    )
    with ExitStack() as stack:
        folder, dense = stack.enter_context(_beside_experts(found, str(model)))
        refuse_pack(str(model), folder, experts)  # one that came from the hub
        small = small_files(folder)
        plan = _plan(found, folder, str(model), {} if calibration is None else calibration.meta)
        if target.exists():
            return _already(target, plan, began, folder)
        shards = shards_of(dense)
        packer = stack.enter_context(
            Packer(target, plan, file_bytes=sum(shard.size_bytes for shard in shards), progress=progress)
        )
        missing = packer.missing()
        _write_dense(packer, shards)
        collected = packer.folder / MOMENTS_FILE
        if calibration is not None and missing:
            moments.expect(found.moe_layers)
            calibration.collect(moments, collected)
        packer.add_all(read_experts(found.catalog, missing))
        collected.unlink(missing_ok=True)
        for file in small:
            content, name = file.read_bytes(), str(file.relative_to(folder))
            packer.add_small(name, packed_config(content, _dtype(found)) if name == "config.json" else content)
        packer.finish()
        keep_quality(folder, target)
    resumed = sum(layer.experts for layer in plan.layers) - len(missing)
    return _report(target, plan, began, resumed=resumed)


def refuse_pack(model: str, folder: Path, experts: str) -> None:
    """Raise HotsetError for a pack that is to be made small: its experts are used as they were packed."""
    if experts in MADE and is_packed(folder):
        raise HotsetError(f"{model} is a pack, whose experts stay as they are: give the model that it was made from")


def keep_quality(source: Path, target: Path) -> None:
    """Put into a pack of a pack what the latter knows of its quality, if their experts are the same bytes."""
    if not is_packed(source):
        return
    old, new = open_index(source), open_index(target)
    same = old.plan.layers == new.plan.layers and old.digests == new.digests
    if same and old.quality is not None and new.quality is None:
        write_quality(target, old.quality)


def inspect_experts(
    model: str,
    dtype: str | None = None,
    auto_class: Any = None,
    *,
    trust_remote_code: bool = False,
    experts: str = AUTO,
    importance: Moments | None = None,
) -> Inspected:
    """Find the experts of a checkpoint as `load` would, on a model without memory; of GGUF files the rest is loaded."""
    deferred = DeferredExperts(keep=lambda *_: False, experts=experts, importance=importance)
    keywords = {"dtype": dtype or "auto", "trust_remote_code": trust_remote_code}
    try:
        return inspect_checkpoint(model, keywords, deferred, auto_class, load_rest=is_gguf(model))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the model {model}: {str(error).strip().partition(chr(10))[0]}") from error


@contextmanager
def _beside_experts(found: Inspected, model: str) -> Iterator[tuple[Path, dict[str, StoredTensor]]]:
    """The folder of a checkpoint's small files, and its other weights."""
    gguf = found.deferred.gguf
    if gguf is None:
        yield source_folder(model), dense_tensors(found)
        return
    with small_files_of(found.model, gguf) as folder:
        yield folder, weights_of(found.model)


def dense_tensors(found: Inspected) -> dict[str, StoredTensor]:
    """The stored tensors that no expert is made of, in the order of their files."""
    catalog, files = found.catalog, found.deferred.files
    starts: dict[Path, list[int]] = {path: [] for path in catalog.files}
    for layer in catalog.layers:
        for segment in (segment for expert in layer.experts for segment in expert):
            starts[catalog.files[segment.file]].append(segment.offset)
    for offsets in starts.values():
        offsets.sort()
    stored = read_headers([str(file) for file in files])
    dense = {
        name: t
        for name, t in stored.items()
        if name not in found.deferred.unused and not _begins_in(starts.get(t.file, []), t)
    }
    return dict(sorted(dense.items(), key=lambda item: (files.index(item[1].file), item[1].offset)))


def read_experts(catalog: Catalog, wanted: Sequence[PackKey]) -> Iterator[tuple[int, int, Bytes]]:
    """Read experts in this order, several at a time; what is yielded is good until the next is asked for."""
    depth = max(2, min(MAX_READS, MAX_READ_BYTES // catalog.slot_bytes))
    slots = [np.frombuffer(aligned_buffer(catalog.slot_bytes), np.uint8) for _ in range(depth)]
    readers = Readers(catalog, slots.__getitem__)
    under_way: deque[tuple[ReadTransfer, Load]] = deque()
    try:
        for number, key in enumerate(wanted):
            under_way.append((ReadTransfer(), Load(key.layer, key.expert, number % depth)))
            readers.start(under_way[-1][0], [under_way[-1][1]])
            if len(under_way) == depth:
                yield _arrived(*under_way.popleft(), slots)
        while under_way:
            yield _arrived(*under_way.popleft(), slots)
    finally:
        for transfer, _ in under_way:
            transfer.cancel_and_wait()
        readers.close()


def _arrived(transfer: ReadTransfer, load: Load, slots: list[Bytes]) -> tuple[int, int, Bytes]:
    transfer.wait_any()
    return load.layer, load.expert, slots[load.row]


def _plan(found: Inspected, folder: Path, model: str, more: dict[str, str]) -> PackPlan:
    layers = zip(found.moe_layers, found.catalog.layers, strict=True)
    meta = {
        "model": (Path(model) if is_gguf(model) else folder).resolve().name if Path(model).exists() else model,
        "dtype": dtype_name(found.model._hotset_dtypes),
        "fingerprint": fingerprint([*found.deferred.files, *found.catalog.files], folder),
        **more,
    }
    return PackPlan(
        tuple(PackLayer(moe_layer.name, layer.layout, len(layer.experts)) for moe_layer, layer in layers), meta
    )


def _dtype(found: Inspected) -> str:
    """The type that a model computes in; one without memory says it in its config."""
    return str(found.model.config.dtype if found.deferred.gguf is None else found.model.dtype).removeprefix("torch.")


def fingerprint(files: Sequence[Path], folder: Path) -> str:
    """Tells one state of a checkpoint from another without reading it: names, sizes and times, and its config."""
    digest = new_digest()
    for file in sorted(set(files)):
        state = file.stat()
        digest.update(json.dumps([file.name, state.st_size, state.st_mtime_ns]).encode())
    digest.update((folder / "config.json").read_bytes())
    return digest.hexdigest()


def _begins_in(starts: list[int], tensor: StoredTensor) -> bool:
    """Whether some expert's bytes begin within a tensor, which then is made of experts throughout."""
    at = bisect_left(starts, tensor.offset)
    return at < len(starts) and starts[at] < tensor.offset + tensor.size_bytes


def _write_dense(packer: Packer, shards: Sequence[Shard]) -> None:
    for shard in shards:
        packer.add_file(shard.name, shard.chunks())
    if len(shards) > 1:
        packer.add_small(INDEX_NAME, shard_index(shards))


def _already(target: Path, plan: PackPlan, began: float, folder: Path) -> PackReport:
    """What to say of a pack that is there: complete if it is of this model, refused if not."""
    index = open_index(target)
    if index.plan != plan:
        raise HotsetError(
            f"{target} is a pack of another model, another state of it or with other options "
            f"({index.plan.meta.get('model')}, {index.plan.meta.get('dtype')}): choose another name, or remove it"
        )
    tidy(target)
    keep_quality(folder, target)  # a run may have been interrupted just before
    return _report(target, plan, began, complete_already=True)


def _report(
    target: Path, plan: PackPlan, began: float, *, resumed: int = 0, complete_already: bool = False
) -> PackReport:
    files = sorted(file for file in target.rglob("*") if file.is_file())
    experts, index = sum(layer.experts for layer in plan.layers), open_index(target)
    return PackReport(
        folder=target,
        files=[str(file.relative_to(target)) for file in files],
        size_bytes=sum(file.stat().st_size for file in files),
        experts=experts,
        digests=experts + len(index.files) + len(index.small),
        resumed=resumed,
        seconds=time.perf_counter() - began,
        complete_already=complete_already,
        quality=index.quality,
    )
