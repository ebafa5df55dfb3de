"""Traces that other tools wrote: one module per format, found by its file; nothing to register."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path
from typing import Any

from hotset.errors import HotsetError, TraceError
from hotset.reading import check_regular, open_regular
from hotset.trace.importers._options import ImportOptions
from hotset.trace.trace import Trace

__all__ = ["ImportOptions", "import_trace", "kinds"]

_HEAD_BYTES = 4096


def import_trace(
    path: str | Path,
    *,
    kind: str | None = None,
    experts: int | None = None,
    expert_bytes: int | None = None,
    model: str | None = None,
) -> Trace:
    """Read a trace that another tool wrote; suffix or content tells the format unless `kind` names it."""
    path = Path(path)
    try:
        check_regular(path)
        trace: Trace = _choose(path, kind).read(path, ImportOptions(experts, expert_bytes, model))
    except FileNotFoundError:
        raise TraceError(f"no such file: {path}") from None
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
    except HotsetError as error:
        raise TraceError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    return trace


def kinds() -> tuple[str, ...]:
    """The names of all import formats."""
    own = pkgutil.iter_modules(__path__)
    return tuple(sorted(module.name for module in own if not module.name.startswith("_")))


def _choose(path: Path, kind: str | None) -> Any:
    modules = {name: import_module(f"{__name__}.{name}") for name in kinds()}
    if kind is not None:
        return _by_kind(modules, kind)
    for module in modules.values():
        if path.suffix.lower() in module.SUFFIXES:
            return module
    with open_regular(path) as file:
        head = file.read(_HEAD_BYTES)
    for module in modules.values():
        if module.recognises(head):
            return module
    raise TraceError(f"{path} is in none of the formats known ({', '.join(modules)}): name one with --kind")


def _by_kind(modules: dict[str, Any], kind: str) -> Any:
    for name, module in modules.items():
        if kind == name or f".{kind}" in module.SUFFIXES:
            return module
    raise TraceError(f"no import format is called {kind!r}: choose from {', '.join(modules)}")
