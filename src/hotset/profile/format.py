"""The profile file: one safetensors file, specified in docs/formats.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hotset.errors import HotsetError, ProfileError
from hotset.files import write_beside
from hotset.profile.profile import Fingerprint, Profile
from hotset.profile.statistics import MAX_SPANS, History, Mark
from hotset.shape import MAX_GRID, ModelShape
from hotset.trace import Phase

KIND, VERSION = "profile", 1
LEARNT = "learnt."
_OPTIONAL = {"hits": ("I64", True), "misses": ("I64", True), "seats": ("U8", False)}
"""Tensors that may be missing: their type, and whether they are counted by phase."""
MAX_LEARNT_BYTES = 256 << 20
"""More than any policy keeps: a file that claims more is refused before it is read."""


def save_profile(profile: Profile, path: Path) -> None:
    """Write the profile beside its place and rename it there once it is whole."""
    tensors: dict[str, npt.NDArray[Any]] = {"tokens": profile.tokens, "uses": profile.uses}
    tensors |= {name: array for name in _OPTIONAL if (array := getattr(profile, name)) is not None}
    if len(profile.history.spans):
        tensors["history"] = profile.history.spans
    tensors |= {LEARNT + name: array for name, array in profile.learnt.items()}
    plain = {name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)}
    with write_beside(path) as scratch:
        try:
            save_file(plain, scratch, metadata={"hotset": json.dumps(_header(profile), sort_keys=True)})
        except SafetensorError as error:
            raise HotsetError(f"cannot write {path}: {error}; free some space or choose another place") from error


def load_profile(path: Path) -> Profile:
    """Read and validate a profile; whatever is wrong with it becomes one clear ProfileError."""
    try:
        with safe_open(path, framework="numpy") as file:
            return _build(file, _parse_header(file.metadata()))
    except FileNotFoundError:
        raise ProfileError(f"no such profile: {path}") from None
    except (SafetensorError, OSError) as error:
        raise ProfileError(f"{path} is not a profile, or it is damaged ({error}): learn it again") from error
    except HotsetError as error:
        raise ProfileError(f"{path}: {error}") from None


def _header(profile: Profile) -> dict[str, Any]:
    shape, mark = profile.shape, profile.fingerprint
    return {
        "kind": KIND,
        "version": VERSION,
        "shape": {
            "layers": shape.layers,
            "experts": shape.experts,
            "top_k": shape.top_k,
            "expert_bytes": shape.expert_bytes,
        },
        "fingerprint": {"architecture": mark.architecture, "digest": mark.digest},
        "created": profile.created,
        "updated": profile.updated,
        "policy": profile.policy,
        "marks": [[mark.tokens, mark.label] for mark in profile.history.marks],
        "meta": profile.meta,
    }


def _parse_header(metadata: dict[str, str] | None) -> dict[str, Any]:
    try:
        header = json.loads((metadata or {})["hotset"])
        kind, version = header["kind"], header["version"]
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ProfileError('not a hotset profile: its metadata has no valid "hotset" key') from None
    if kind != KIND:
        raise ProfileError(f"a hotset {kind!r:.40}, not a profile")
    if type(version) is not int or version != VERSION:
        raise ProfileError(f"profile format {version!r:.40}; this hotset reads format {VERSION}: upgrade hotset")
    return dict(header)


def _build(file: Any, header: dict[str, Any]) -> Profile:
    names = set(file.keys())
    for name in ("tokens", "uses"):
        if name not in names:
            raise ProfileError(f"it lacks the tensor {name!r}")
    learnt = sorted(name for name in names if name.startswith(LEARNT))
    if unknown := names - {"tokens", "uses", "history", *_OPTIONAL, *learnt}:
        raise ProfileError(f"it has a tensor {min(unknown)!r} that format {VERSION} does not know")
    shape = _shape(header)
    _check_stored(file, shape, learnt)
    optional: dict[str, Any] = {name: file.get_tensor(name) for name in _OPTIONAL if name in names}
    return Profile(
        shape=shape,
        fingerprint=Fingerprint(**_texts(header.get("fingerprint"), "fingerprint", {"architecture", "digest"})),
        uses=file.get_tensor("uses"),
        tokens=file.get_tensor("tokens"),
        history=_history(file, header),
        learnt={name.removeprefix(LEARNT): file.get_tensor(name) for name in learnt},
        meta=_texts(header.get("meta", {}), "meta"),
        **optional,
        **_texts({key: header.get(key) for key in ("created", "updated", "policy")}, "header"),
    )


def _shape(header: dict[str, Any]) -> ModelShape:
    fields = header.get("shape")
    wanted = {"layers", "experts", "top_k", "expert_bytes"}
    if not isinstance(fields, dict) or fields.keys() != wanted:
        raise ProfileError("the header does not state the shape of the model")
    if not all(type(value) is int or (key == "expert_bytes" and value is None) for key, value in fields.items()):
        raise ProfileError("the shape of the model in the header must be whole numbers")
    return ModelShape(**fields)


def _check_stored(file: Any, shape: ModelShape, learnt: list[str]) -> None:
    """Refuse wrong types and sizes before anything is allocated."""
    uses, tokens = file.get_slice("uses"), file.get_slice("tokens")
    if uses.get_dtype() != "F64" or uses.get_shape() != [len(Phase), shape.layers, shape.experts]:
        raise ProfileError("the counts are not of the shape that the header states")
    if tokens.get_dtype() != "I64" or tokens.get_shape() != [len(Phase)]:
        raise ProfileError("the numbers of tokens are not one per phase")
    grid = [shape.layers, shape.experts]
    for name, (dtype, phases) in _OPTIONAL.items():
        if name not in file.keys():  # noqa: SIM118 - a safetensors file is no dict
            continue
        stored = file.get_slice(name)
        if stored.get_dtype() != dtype or stored.get_shape() != ([len(Phase), *grid] if phases else grid):
            raise ProfileError(f"{name} is not of the shape that the header states")
    total = 0
    for name in learnt:
        size = 8 * int(np.prod(file.get_slice(name).get_shape(), dtype=np.float64))
        total += size
        if size > MAX_LEARNT_BYTES or total > MAX_LEARNT_BYTES or len(learnt) > MAX_GRID:
            raise ProfileError(f"{name} is larger than anything a policy learns")


def _history(file: Any, header: dict[str, Any]) -> History:
    """Hits over time, if the file has them."""
    marks = header.get("marks", [])
    plain = isinstance(marks, list) and len(marks) <= MAX_SPANS
    if not plain or not all(isinstance(m, list) and [type(x) for x in m] == [int, str] for m in marks):
        raise ProfileError("the marks in the header must be pairs of a number of tokens and a name")
    if "history" not in file.keys():  # noqa: SIM118 - a safetensors file is no dict
        return History(np.zeros((0, 3), np.int64), tuple(Mark(*mark) for mark in marks))
    stored = file.get_slice("history")
    rows = stored.get_shape()
    if stored.get_dtype() != "I64" or len(rows) != 2 or rows[1] != 3 or rows[0] > MAX_SPANS:
        raise ProfileError(f"the history is not a table of at most {MAX_SPANS} rows of tokens, hits and misses")
    spans = file.get_tensor("history")
    if (spans < 0).any():
        raise ProfileError("the history has a negative count: the file was edited, or is damaged")
    return History(spans, tuple(Mark(*mark) for mark in marks))


def _texts(value: Any, what: str, keys: set[str] | None = None) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ProfileError(f"{what} must map names to text")
    if keys is not None and value.keys() != keys:
        raise ProfileError(f"{what} must have {', '.join(sorted(keys))}")
    return value
