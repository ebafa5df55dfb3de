"""Importer for numpy archives: `experts` [tokens, layers, k] with requests laid end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.errors import TraceError
from hotset.reading import TooLargeError, parse_bounded, read_bounded
from hotset.trace.event import Phase
from hotset.trace.format import signed
from hotset.trace.importers._archive import first_member, read_arrays
from hotset.trace.importers._options import ImportOptions, choose_shape, describe_source, number_passes
from hotset.trace.trace import Labels, Trace

SUFFIXES = (".npz",)
_KEYS = ("experts", "req_len", "tok", "weights", "weights_u8", "phase", "layer_ids")
_MAX_LABEL_BYTES, _MAX_LABEL_VALUES = 64 << 20, 1 << 20
_SHARES = (np.arange(256) / 255).astype(np.float16)

Array = npt.NDArray[Any]


def recognises(head: bytes) -> bool:
    """Whether the first bytes of a file look like a zip archive whose first member is an array."""
    return first_member(head).endswith(b".npy")


def read(path: Path, options: ImportOptions) -> Trace:
    """Read a numpy archive, and the labels in `<stem>.requests.json` beside it."""
    arrays = read_arrays(path, _KEYS)
    for name in ("experts", "req_len"):
        if name not in arrays:
            raise TraceError(f"the archive has no array {name!r}")
    stored = arrays["experts"]
    if stored.dtype.kind != "u" or stored.ndim != 3 or 0 in stored.shape:
        raise TraceError(f"experts is {stored.dtype} {stored.shape}, not unsigned [tokens, layers, top_k]")
    experts = signed(stored, "experts")
    request = _requests(arrays["req_len"], len(experts))
    phase = _phases(arrays.get("phase"), len(experts))
    shape = choose_shape(options, experts.shape[1], experts.shape[2], int(experts.max(initial=-1)))
    meta = describe_source(path, options, shape, stated=False)
    if "layer_ids" in arrays:
        ids = _column(arrays["layer_ids"], "layer_ids", shape.layers, f"layer ({shape.layers})")
        meta["layer_ids"] = ",".join(map(str, ids.tolist()))
    return Trace(
        shape=shape,
        experts=experts,
        request=request,
        step=number_passes(request, phase),
        phase=phase,
        weights=_weights(arrays, experts),
        token_ids=_token_ids(arrays.get("tok"), len(experts)),
        labels=_labels(path.with_suffix(".requests.json"), int(request[-1]) + 1),
        meta=meta,
    )


def _column(stored: Array, name: str, length: int, what: str = "token", kinds: str = "iu") -> Array:
    if stored.shape != (length,) or stored.dtype.kind not in kinds:
        raise TraceError(f"{name} is {stored.dtype} {stored.shape}, not one whole number per {what}")
    return stored


def _requests(lengths: Array, tokens: int) -> npt.NDArray[np.int32]:
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or len(lengths) == 0:
        raise TraceError("req_len must be a list of whole numbers, one per request")
    wrong = (lengths < 1) | (lengths > tokens)
    if wrong.any():
        first = int(np.argmax(wrong))
        raise TraceError(f"req_len gives request {first} a length of {int(lengths[first])} tokens, of {tokens} in all")
    if (total := int(lengths.sum(dtype=np.int64))) != tokens:
        raise TraceError(f"req_len adds up to {total} tokens, but experts holds {tokens}")
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths.astype(np.int64))


def _phases(stored: Array | None, tokens: int) -> npt.NDArray[np.uint8]:
    if stored is None:
        return np.full(tokens, Phase.DECODE, np.uint8)
    if not np.isin(_column(stored, "phase", tokens, kinds="iub"), (0, 1)).all():
        raise TraceError("phase must be 0 (prefill) or 1 (decode) everywhere")
    return stored.astype(np.uint8)


def _weights(arrays: dict[str, Array], experts: npt.NDArray[np.int16]) -> npt.NDArray[np.float16] | None:
    name = "weights" if "weights" in arrays else "weights_u8"
    if name not in arrays:
        return None
    stored, wanted = arrays[name], "f" if name == "weights" else "u"
    if stored.shape != experts.shape or stored.dtype.kind != wanted or (wanted == "u" and stored.itemsize > 1):
        raise TraceError(f"{name} is {stored.dtype} {stored.shape}, which does not go with experts {experts.shape}")
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and validation names it
        weights: npt.NDArray[np.float16] = _SHARES[stored] if wanted == "u" else stored.astype(np.float16)
    weights[experts < 0] = 0
    return weights


def _token_ids(stored: Array | None, tokens: int) -> npt.NDArray[np.int32] | None:
    if stored is None:
        return None
    if int(_column(stored, "tok", tokens).min()) < 0 or int(stored.max()) > np.iinfo(np.int32).max:
        raise TraceError("tok holds a token id that is negative or beyond 31 bits")
    return stored.astype(np.int32)


def _labels(path: Path, requests: int) -> Labels:
    if not path.is_file():
        return ()
    try:
        data = read_bounded(path, _MAX_LABEL_BYTES)
        records = parse_bounded(data, values=_MAX_LABEL_VALUES, containers=_MAX_LABEL_VALUES)
    except TooLargeError as error:
        raise TraceError(f"{path} describes no requests: {error}; move it away") from None
    except (ValueError, RecursionError):
        raise TraceError(f"{path} is not valid JSON: mend it or move it away") from None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise TraceError(f"{path} must be a list of objects, one per request")
    if len(records) != requests:
        raise TraceError(f"{path} describes {len(records)} requests, but the archive holds {requests}")
    plain = str | int | float
    return tuple({key: str(value) for key, value in record.items() if isinstance(value, plain)} for record in records)
