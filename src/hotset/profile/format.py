"""The profile file: one safetensors file, specified in docs/reference/formats.md."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from hotset.errors import HotsetError, ProfileError
from hotset.profile.matrices import Matrices
from hotset.profile.profile import Fingerprint, Profile
from hotset.profile.statistics import MAX_SPANS, Counts, Grid, History, Mark
from hotset.reading import header_bytes, parse_bounded
from hotset.shape import ModelShape
from hotset.trace import Phase
from hotset.trace.format import parse_shape, save_tensors

KIND, VERSION = "profile", 1
LEARNT, MATRICES = "learnt.", "matrices."
_OPTIONAL = {"hits": ("I64", True), "misses": ("I64", True), "seats": ("U8", False)}
"""Tensors that may be missing: their type, and whether they are counted by phase."""
_SPARSE = {"sizes": ("U16", 3), "expert": ("U16", 1), "count": ("F32", 1)}
"""The tensors of the matrices, all there or none: their type and number of sides."""
_NUMBERS = {"F64", "F32", "F16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8"}
MAX_LEARNT_BYTES = 256 << 20
"""More than any policy keeps: a file that claims more is refused before it is read."""
MAX_LEARNT = 256
MAX_COUNT = 1 << 40
"""More tokens than any run sees; up to here no sum over a model overflows."""
MAX_USES = 1e30
MAX_HEADER = 4 << 20
MAX_FILE_HEADER_BYTES = 16 << 20
MAX_VALUES = 1 << 19
"""The most values in the header, nearly all of them in the marks."""
MAX_TEXT = 200
"""The most letters of a label, and of any text of the header that ends up in a message."""


def save_profile(profile: Profile, path: Path) -> None:
    """Write the profile beside its place and rename it there once it is whole."""
    tensors: dict[str, npt.NDArray[Any]] = {"tokens": profile.tokens, "uses": profile.uses}
    optional = {"hits": profile.hits, "misses": profile.misses, "seats": profile.residency}
    tensors |= {name: array for name, array in optional.items() if array is not None}
    if len(profile.history.spans):
        tensors["history"] = profile.history.spans
    if profile.matrices is not None:
        tensors |= {MATRICES + name: getattr(profile.matrices, name) for name in _SPARSE}
    tensors |= {LEARNT + name: array for name, array in profile.learnt.items()}
    save_tensors(path, tensors, json.dumps(_header(profile), sort_keys=True))


def load_profile(path: Path) -> Profile:
    """Read and validate a profile; whatever is wrong with it becomes one clear ProfileError."""
    with _opened(path) as file:
        header = _parse_header(file.metadata())
        version = header.get("version")
        if type(version) is not int or version != VERSION:
            raise ProfileError(f"it is not of profile format {VERSION}, which this hotset reads: upgrade hotset")
        try:
            return _build(file, header)
        except HotsetError as error:
            raise ProfileError(f"{error}: the file was edited, or is damaged; learn or make it again") from None


def check_kind(path: Path) -> None:
    """Raise ProfileError unless the file calls itself a profile, whatever else may be wrong with it."""
    with _opened(path) as file:
        _parse_header(file.metadata())


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The open file; every fault inside becomes a ProfileError that names it."""
    try:
        _check_file(path)
        with safe_open(path, framework="numpy") as file:
            yield file
    except FileNotFoundError:
        raise ProfileError(f"no such profile: {path}; hotset profile list shows those there are") from None
    except (SafetensorError, MemoryError) as error:  # a file is mapped whole, whatever its header says
        why = "".join(letter if letter.isprintable() else " " for letter in str(error))
        raise ProfileError(f"{path} is not a profile, or it is damaged ({why:.200}): learn or make it again") from error
    except OSError as error:
        raise ProfileError(f"cannot read {path} ({error.strerror or error}): name a file that you may read") from error
    except HotsetError as error:
        raise ProfileError(f"{path}: {error}") from None


def _check_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except ValueError as error:  # a path that no system takes
        raise ProfileError(f"no path for a file ({error}): name another") from error
    if not stat.S_ISREG(mode):  # a pipe would wait for ever
        raise ProfileError("a folder or a device, not a file: name the file of a profile")
    try:
        header_bytes(path, MAX_FILE_HEADER_BYTES)
    except ValueError as error:
        raise ProfileError(f"not a profile, or it is damaged ({error}): learn or make it again") from None


def _header(profile: Profile) -> dict[str, Any]:
    marks = sorted(profile.history.marks, key=lambda mark: mark.tokens)
    words = {name: getattr(profile, name) for name in ("created", "updated", "policy", "meta")}
    return words | {
        "kind": KIND,
        "version": VERSION,
        "shape": asdict(profile.shape),
        "fingerprint": asdict(profile.fingerprint),
        "marks": [[mark.tokens, mark.label[:MAX_TEXT]] for mark in marks],
    }


def _parse_header(metadata: dict[str, str] | None) -> dict[str, Any]:
    text = (metadata or {}).get("hotset", "")
    if len(text) > MAX_HEADER:
        raise ProfileError(f"its header is longer than {MAX_HEADER:,} letters: learn or make it again")
    try:
        header = parse_bounded(text.encode(), values=MAX_VALUES, containers=MAX_VALUES)
    except (ValueError, RecursionError):
        header = None
    kind = header.get("kind") if isinstance(header, dict) else None
    if kind == "trace":
        raise ProfileError("a trace, not a profile: hotset profile make TRACE -o NAME turns it into one")
    if not isinstance(header, dict) or kind != KIND:
        raise ProfileError("a safetensors file, but not a hotset profile: hotset profile list shows those there are")
    return header


def _build(file: Any, header: dict[str, Any]) -> Profile:
    names = set(file.keys())
    for name in ("tokens", "uses"):
        if name not in names:
            raise ProfileError(f"it lacks the tensor {name!r}")
    learnt = sorted(name for name in names if name.startswith(LEARNT))
    if unknown := names - {"tokens", "uses", "history", *_OPTIONAL, *(MATRICES + name for name in _SPARSE), *learnt}:
        raise ProfileError(f"it has a tensor {min(unknown)!r:.60} that format {VERSION} does not know")
    shape = parse_shape(header)
    _check_stored(file, names, shape)
    _check_learnt(file, learnt)
    mark = _texts(header.get("fingerprint"), "the fingerprint", ("architecture", "digest"))
    words = _texts({key: header.get(key) for key in ("created", "updated", "policy")}, "the header")
    return Profile(
        shape=shape,
        fingerprint=Fingerprint(**mark),
        uses=_uses(file),
        tokens=_counts(file, "tokens"),
        **words,
        learnt={name.removeprefix(LEARNT): _learnt(file, name) for name in learnt},
        hits=_counts(file, "hits") if "hits" in names else None,
        misses=_misses(file, shape) if "misses" in names else None,
        residency=file.get_tensor("seats") if "seats" in names else None,
        history=History(_spans(file, names), _marks(header)),
        matrices=_matrices(file, names),
        meta=_meta(header),
    )


def _check_stored(file: Any, names: set[str], shape: ModelShape) -> None:
    """Refuse wrong types and sizes before anything is allocated."""
    grid = [shape.layers, shape.experts]
    wanted = {"uses": ("F64", [len(Phase), *grid]), "tokens": ("I64", [len(Phase)])}
    wanted |= {name: (dtype, [len(Phase), *grid] if phases else grid) for name, (dtype, phases) in _OPTIONAL.items()}
    for name in wanted.keys() & names:
        stored = file.get_slice(name)
        if (stored.get_dtype(), stored.get_shape()) != wanted[name]:
            raise ProfileError(f"{name} is not of the type and shape that the header states")


def _check_learnt(file: Any, names: list[str]) -> None:
    """Refuse what no policy learns, before it is allocated."""
    if len(names) > MAX_LEARNT:
        raise ProfileError(f"it has {len(names):,} learnt tensors, and no policy has more than {MAX_LEARNT}")
    total_bytes = 0
    for name in names:
        stored = file.get_slice(name)
        sides = [max(side, 1) for side in stored.get_shape()]
        total_bytes += 8 * math.prod(sides)
        if len(sides) > 8 or total_bytes > MAX_LEARNT_BYTES:
            raise ProfileError(f"{name!r:.60} is larger than anything a policy learns")
        if stored.get_dtype() not in _NUMBERS:
            raise ProfileError(f"{name!r:.60} is stored as {stored.get_dtype()}, and not as plain numbers")


def _uses(file: Any) -> Grid:
    uses: Grid = file.get_tensor("uses")
    if not ((uses >= 0) & (uses <= MAX_USES)).all():
        raise ProfileError("a count of uses is negative, far too large or no number")
    return uses


def _counts(file: Any, name: str) -> Counts:
    counts: Counts = file.get_tensor(name)
    if ((counts < 0) | (counts > MAX_COUNT)).any():
        raise ProfileError(f"a count of {name} is negative or far too large")
    return counts


def _misses(file: Any, shape: ModelShape) -> Counts:
    misses = _counts(file, "misses")
    if int(misses.sum()) * (shape.expert_bytes or 0) >= 1 << 63:
        raise ProfileError("the misses would have moved more bytes than any machine does")
    return misses


def _learnt(file: Any, name: str) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = file.get_tensor(name)
    if np.isnan(array).any():  # infinity has a meaning: an expert that was never used
        raise ProfileError(f"{name!r:.60} holds something that is no number")
    return array


def _spans(file: Any, names: set[str]) -> Counts:
    """Hits over time, if the file has them."""
    if "history" not in names:
        return History.empty().spans
    stored = file.get_slice("history")
    rows = stored.get_shape()
    if stored.get_dtype() != "I64" or len(rows) != 2 or rows[1] != 3 or rows[0] > MAX_SPANS:
        raise ProfileError(f"the history is not a table of at most {MAX_SPANS} rows of tokens, hits and misses")
    return _counts(file, "history")


def _matrices(file: Any, names: set[str]) -> Matrices | None:
    """What single requests used, if the file has it; the profile checks what they say."""
    if not any(name.startswith(MATRICES) for name in names):
        return None
    for name, wanted in _SPARSE.items():
        if MATRICES + name not in names:
            raise ProfileError(f"it lacks the tensor '{MATRICES}{name}'")
        stored = file.get_slice(MATRICES + name)
        if (stored.get_dtype(), len(stored.get_shape())) != wanted:
            raise ProfileError(f"{MATRICES}{name} is not {wanted[0]} with {wanted[1]} sides")
    return Matrices(**{name: file.get_tensor(MATRICES + name) for name in _SPARSE})


def _marks(header: dict[str, Any]) -> tuple[Mark, ...]:
    marks = header.get("marks", [])
    if not isinstance(marks, list) or len(marks) > MAX_SPANS or not all(map(_is_mark, marks)):
        raise ProfileError(f"the marks must be pairs of a number of tokens and a name of at most {MAX_TEXT} letters")
    found = tuple(Mark(*mark) for mark in marks)
    if any(late.tokens < early.tokens for early, late in pairwise(found)):
        raise ProfileError("the marks are not in the order of their tokens")
    return found


def _is_mark(mark: Any) -> bool:
    plain = isinstance(mark, list) and [type(part) for part in mark] == [int, str]
    return plain and 0 <= mark[0] <= MAX_SPANS * MAX_COUNT and len(mark[1]) <= MAX_TEXT


def _texts(value: Any, what: str, keys: tuple[str, ...] = ()) -> dict[str, str]:
    """Short words, safe to print in a message."""
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ProfileError(f"{what} must map names to text")
    if keys and value.keys() != set(keys):
        raise ProfileError(f"{what} must have {' and '.join(keys)}")
    if any(len(item) > MAX_TEXT or not item.isprintable() for item in value.values()):
        raise ProfileError(f"a text of {what} is longer than {MAX_TEXT} letters, or not printable")
    return value


def _meta(header: dict[str, Any]) -> dict[str, str]:
    meta = header.get("meta", {})
    if not isinstance(meta, dict) or not all(isinstance(item, str) for item in meta.values()):
        raise ProfileError("meta must map names to text")
    return meta
