"""Compiled code is kept on disk where that is possible; where it is not, one line says so and everything works."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from numba import njit
from numba.core.caching import FunctionCache, NullCache

F = TypeVar("F", bound=Callable[..., Any])

_LOG = logging.getLogger("hotset.compiling")
_LOG.setLevel(logging.WARNING)  # whatever else is kept quiet: this is said once, to whom it costs time at every start
_said = False
_callbacks: list[Any] = []  # what was compiled goes when nothing refers to it


def keep_compiled(**options: Any) -> Callable[[F], F]:
    """Compile a function with Numba, and keep the machine code on disk."""

    def compile_it(function: F) -> F:
        dispatcher: Any = njit(**options)(function)
        if hasattr(dispatcher, "_cache"):  # it has none where compilation is switched off for debugging
            dispatcher._cache = _cache_of(function)
        compiled: F = dispatcher
        return compiled

    return compile_it


def keep_callback(function: Callable[..., Any]) -> int:
    """Compile a function of one whole number to one that C can call, keep its machine code, and return its address."""
    from numba import types
    from numba.core.ccallback import CFunc

    compiled: Any = CFunc(function, ((types.int64,), types.void), locals={}, options={"error_model": "numpy"})
    compiled._cache = _cache_of(function)
    compiled.compile()
    _callbacks.append(compiled)
    return int(compiled.address)


def _cache_of(function: Callable[..., Any]) -> Any:
    try:
        return _Kept(function)  # type: ignore[no-untyped-call]
    except (RuntimeError, OSError):  # Numba finds no folder that it may write to
        return _NotKept()


class _Kept(FunctionCache):
    """Files of machine code: one that is damaged is compiled anew, and a full disk holds nothing up."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with suppress(Exception):  # whatever is wrong with a file, there is another way to get what it holds
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            self._save_anew(sig, data)
        except OSError as error:
            _say(f"{self.cache_path}: {error.strerror or error}")

    def _save_anew(self, sig: Any, data: Any) -> None:
        """Save, and where the index of the files is damaged, begin another one."""
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except OSError:
            raise
        except Exception:
            self.flush()  # type: ignore[no-untyped-call]
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


class _NotKept(NullCache):
    """Where there is no place for files."""

    def save_overload(self, sig: Any, cres: Any) -> None:  # noqa: ARG002 - as Numba calls it
        _say("neither hotset's folder nor the home folder can be written to")


def _say(reason: str) -> None:
    global _said
    if not _said:
        _said = True
        _LOG.warning(
            "note: compiled code cannot be kept, so every start compiles it again (%s): set NUMBA_CACHE_DIR to a "
            "folder that can be written to",
            reason,
        )


def give_triton_a_folder() -> None:
    """Have Triton keep its kernels in a temporary folder where it could not write to its own."""
    if "TRITON_CACHE_DIR" in os.environ or _can_be_made(Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton"):
        return
    with suppress(OSError):
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="hotset-triton-")
        _say("Triton's folder cannot be written to, either")


def _can_be_made(folder: Path) -> bool:
    """Whether a folder is there and can be written to, or can be made."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    return False
