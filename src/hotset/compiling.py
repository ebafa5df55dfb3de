"""Compiled code is kept on disk where that is possible; where it is not, one line says so and everything works."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from numba import njit
from numba.core import event
from numba.core.caching import FunctionCache, NullCache
from numba.core.serialize import dumps

F = TypeVar("F", bound=Callable[..., Any])

_LOG = logging.getLogger("hotset.compiling")
_LOG.setLevel(logging.WARNING)  # whatever else is kept quiet: this is said once, to whom it costs time at every start
_said = False
_only_kept = False  # whether what is not on disk is not compiled
_callbacks: list[Any] = []  # what was compiled goes when nothing refers to it


class NotKeptError(Exception):
    """Code that would have to be compiled, where only what is on disk is wanted."""


class _CompileClock(event.Listener):
    """Adds up the time that this process spends compiling; a function within another counts once."""

    def __init__(self) -> None:
        self.seconds, self._depth, self._began_s = 0.0, 0, 0.0
        self.tell: Callable[[], object] | None = None  # called when the next compilation begins

    def on_start(self, _: Any) -> None:
        if not self._depth:
            self._began_s = time.perf_counter()
            tell, self.tell = self.tell, None
            if tell is not None:
                tell()
        self._depth += 1

    def on_end(self, _: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += time.perf_counter() - self._began_s


_clock = _CompileClock()
event.register("numba:compile", _clock)  # type: ignore[no-untyped-call]


def compile_seconds() -> float:
    """How long this process has compiled so far."""
    return _clock.seconds


@contextmanager
def telling(tell: Callable[[], object]) -> Iterator[None]:
    """Within the block `tell` is called once, as soon as something is compiled that is not on disk."""
    _clock.tell = tell
    try:
        yield
    finally:
        _clock.tell = None


@contextmanager
def only_kept() -> Iterator[None]:
    """Within the block functions are loaded from disk, and one that is not there raises `NotKeptError`."""
    global _only_kept
    _only_kept = True
    try:
        yield
    finally:
        _only_kept = False


def can_be_kept() -> bool:
    """Whether there is a folder for machine code."""
    return not isinstance(_cache_of(can_be_kept), _NotKept)


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
            if (found := super().load_overload(sig, target_context)) is not None:  # type: ignore[no-untyped-call]
                return found
        if _only_kept:
            raise NotKeptError
        return None

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """What tells one compiled form from another: functions that a closure holds count by their names.

        Numba would count what it pickles of them, which is another in every process.
        """
        cells = [cell.cell_contents for cell in self._py_func.__closure__ or ()]
        named = [(cell.__module__, cell.__qualname__) if hasattr(cell, "py_func") else cell for cell in cells]
        held: bytes = dumps(tuple(named))  # type: ignore[no-untyped-call]
        code = self._py_func.__code__.co_code
        return sig, codegen.magic_tuple(), (sha256(code).hexdigest(), sha256(held).hexdigest())

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

    def load_overload(self, sig: Any, target_context: Any) -> Any:  # noqa: ARG002 - as Numba calls it
        if _only_kept:
            raise NotKeptError

    def save_overload(self, sig: Any, cres: Any) -> None:  # noqa: ARG002 - as Numba calls it
        chosen = os.environ.get("NUMBA_CACHE_DIR")
        places = f"NUMBA_CACHE_DIR, {chosen}, cannot" if chosen else "neither hotset's folder nor the home folder can"
        _say(f"{places} be written to")


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
