"""The reference model as large as wanted: every expert padded to a greater width, the output unchanged."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from hotset.errors import HotsetError
from hotset.files import write_beside

INDEX = "model.safetensors.index.json"
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

_BF16_BYTES = 2
_HEADER_BYTES = 256  # more than one tensor takes in a shard's header and in the index together
# Random sign and mantissa under one exponent: finite numbers of 0.016 to 0.031, as large as trained weights.
_NOISE_BITS, _NOISE_EXPONENT = 0x807F, 0x3C80


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of the source, and the shape that it is padded to."""

    name: str
    values: NDArray[np.uint16]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size once padded."""
        return math.prod(self.shape) * _BF16_BYTES


def write_checkpoint(source: Path, width: int, out: Path, shard_bytes: int) -> Path:
    """Write the checkpoint shard by shard, and last the two files that make it one."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    _check_width(width, config["moe_intermediate_size"])
    shards = _split(_tensors(source / "model.safetensors", width), shard_bytes)
    _prepare(out, shards)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(out / name, shard)
    for name in COPIED:
        _write_bytes(out / name, (source / name).read_bytes())
    # Without these two no loader takes the folder for a checkpoint, so they come last.
    _write_json(out / INDEX, _index(names, shards))
    _write_json(out / "config.json", config | {"moe_intermediate_size": width})
    return out


def _check_width(width: int, least: int) -> None:
    if width < least:
        raise HotsetError(
            f"an expert cannot be {width} wide: the reference model's are {least}; ask for {least} or more"
        )


def _tensors(path: Path, width: int) -> list[_Tensor]:
    """All tensors of a safetensors file, memory-mapped, in the order of the file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint16, mode="r", offset=8 + size)
    found = []
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = (offset // _BF16_BYTES for offset in entry["data_offsets"])
        found.append(_Tensor(name, data[begin:end].reshape(entry["shape"]), _padded_shape(name, entry["shape"], width)))
    return found


def _padded_shape(name: str, shape: list[int], width: int) -> tuple[int, ...]:
    if ".experts." not in name:
        return tuple(shape)
    return (shape[0], width) if ".down_proj." in name else (width, shape[1])


def _split(tensors: list[_Tensor], shard_bytes: int) -> list[list[_Tensor]]:
    """Neighbours share a shard until it is full; a tensor larger than a shard gets one of its own."""
    shards: list[list[_Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    return shards


def _prepare(out: Path, shards: list[list[_Tensor]]) -> None:
    """Make the folder, and refuse one that is taken or on too small a disk before the first byte is written."""
    if (out / "config.json").exists() or (out / INDEX).exists():
        raise HotsetError(f"{out} holds a checkpoint already; remove it or choose another place")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HotsetError(f"cannot make the folder {out}: {error.strerror}; choose another place") from error
    needed = sum(tensor.nbytes + _HEADER_BYTES for shard in shards for tensor in shard)
    free = shutil.disk_usage(out).free
    if free < needed:
        raise HotsetError(
            f"the checkpoint takes {needed / 1e9:.2f} GB and {out} has {free / 1e9:.2f} GB free; "
            "free some space, choose another place or a smaller width"
        )


def _write_shard(path: Path, shard: list[_Tensor]) -> None:
    """Write one safetensors file tensor by tensor, so that memory holds one tensor and not one shard."""
    with write_beside(path) as scratch, scratch.open("wb") as file:
        _write_header(file, shard)
        for tensor in shard:
            file.write(_padded(tensor).tobytes())


def _write_header(file: BinaryIO, shard: list[_Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor, begin in zip(shard, _offsets(shard), strict=True):
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + tensor.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data 8-aligned
    file.write(len(text).to_bytes(8, "little") + text)


def _offsets(shard: list[_Tensor]) -> Iterator[int]:
    begin = 0
    for tensor in shard:
        yield begin
        begin += tensor.nbytes


def _padded(tensor: _Tensor) -> NDArray[np.uint16]:
    """The tensor in its new shape: zeros behind the gate's rows, noise behind those of up and down.

    silu(0) x noise x noise is exactly 0, so zeros in the gate alone keep the output; noise elsewhere, because a disk, a
    host or a file system may store and serve zeros for nothing.
    """
    if tensor.values.shape == tensor.shape:
        return tensor.values
    out = np.zeros(tensor.shape, np.uint16) if ".gate_proj." in tensor.name else _noise(tensor)
    rows, columns = tensor.values.shape
    out[:rows, :columns] = tensor.values
    return out


def _noise(tensor: _Tensor) -> NDArray[np.uint16]:
    """Bits of small bf16 numbers, the same for the same tensor in every run."""
    random = np.random.default_rng(list(tensor.name.encode()))
    bits = random.integers(0, 1 << 16, tensor.shape, np.uint16)
    bits &= _NOISE_BITS
    bits |= _NOISE_EXPONENT
    return bits


def _index(names: list[str], shards: list[list[_Tensor]]) -> dict[str, object]:
    return {
        "metadata": {"total_size": sum(tensor.nbytes for shard in shards for tensor in shard)},
        "weight_map": {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
    }


def _write_json(path: Path, document: object) -> None:
    _write_bytes(path, (json.dumps(document, indent=2) + "\n").encode())


def _write_bytes(path: Path, content: bytes) -> None:
    with write_beside(path) as scratch:
        scratch.write_bytes(content)
