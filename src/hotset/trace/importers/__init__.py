"""Traces that other tools wrote: one module per format, found by its file; nothing to register."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path
from typing import Any

from hotset.checks import shown, whole
from hotset.errors import HotsetError, TraceError
from hotset.reading import check_regular, open_regular
from hotset.trace.importers._options import ImportOptions
from hotset.trace.trace import Trace

__all__ = ["ImportOptions", "import_trace", "kinds"]

_HEAD_BYTES = 1 << 16
_MAX_TOKENS = 1 << 40
_OWN = b'{"__metadata__":{"hotset":"{\\"kind\\": \\"trace\\"'
"""How a trace of hotset begins, behind the length of its header."""


def import_trace(
    path: str | Path,
    *,
    kind: str | None = None,
    experts: int | None = None,
    expert_bytes: int | None = None,
    model: str | None = None,
    request_tokens: int | None = None,
    steps: str | None = None,
    first: int | None = None,
) -> Trace:
    """Read a trace that another tool wrote; content or suffix tells the format unless `kind` names it.

    Of the tokens only the `first` are kept, and of large parquet files no more are read; `request_tokens` is the length
    of a request where a file does not say where one begins; `steps` says whether JSON lines number the forward passes
    of each "request", or of all that ran ("shared").
    """
    path = Path(path)
    for count, what in ((first, "the number of tokens to import"), (request_tokens, "the tokens of a request")):
        if count is not None:
            whole(count, what, 1, _MAX_TOKENS, TraceError)
    if steps not in (None, "request", "shared"):
        raise TraceError(f'steps are numbered for each "request", or "shared", not {shown(steps)}')
    options = ImportOptions(experts, expert_bytes, model, request_tokens, steps, first)
    try:
        check_regular(path)
        trace: Trace = _choose(path, kind).read(path, options)
    except FileNotFoundError:
        raise TraceError(f"no such file: {path}") from None
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
    except HotsetError as error:
        raise TraceError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    return trace if first is None or first >= trace.tokens else trace.take(slice(first))


def kinds() -> tuple[str, ...]:
    """The names of all import formats."""
    own = pkgutil.iter_modules(__path__)
    return tuple(sorted(module.name for module in own if not module.name.startswith("_")))


def _choose(path: Path, kind: str | None) -> Any:
    """The module of a kind, else of how the file begins, else of its suffix; a kind may be a suffix, too."""
    modules = {name: import_module(f"{__name__}.{name}") for name in kinds()}
    suffix = path.suffix.lower() if kind is None else f".{kind}"
    by_suffix = next((module for module in modules.values() if suffix in module.SUFFIXES), None)
    if kind in modules:
        return modules[kind]
    if kind is not None and by_suffix is None:
        raise TraceError(f"no import format is called {kind!r}: choose from {', '.join(modules)}")
    with open_regular(path) as file:
        head = file.read(_HEAD_BYTES)
    by_content = next((module for module in modules.values() if module.recognises(head)), by_suffix)
    if by_content is None and _OWN in head:
        raise TraceError(
            f"{path} is a trace of hotset already: there is nothing to import (hotset trace info shows it)"
        )
    if by_content is None:
        raise TraceError(f"{path} is in none of the formats known ({', '.join(modules)}): name one with --kind")
    return by_content
