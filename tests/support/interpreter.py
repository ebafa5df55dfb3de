"""Without a GPU, kernels run in Triton's interpreter, which needs mending for today's NumPy and for speed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

ROOM = 17_000
"""Values on the stack of a launch: Python takes 256 KiB for it, and what is called from there shares the half of it."""


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the interpreter's language in place once for a test; by itself it does so for every call of a function."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        yield
        return
    tritons = pytest.importorskip("triton.runtime.interpreter")
    _mend_loop_bounds(monkeypatch, tritons)
    monkeypatch.setattr(tritons.GridExecutor, "__call__", _roomy(tritons.GridExecutor.__call__))
    language = tritons.tl
    scope = tritons._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    monkeypatch.setattr(tritons, "_patch_lang", lambda _: SimpleNamespace(restore=lambda: None))
    gc.disable()  # it would look through all of torch again and again for the many small things that kernels make
    yield
    gc.enable()
    scope.restore()


def _mend_loop_bounds(monkeypatch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Triton 3.6 takes loop bounds from arrays of one element, which NumPy 2.4 refuses."""
    plain = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


def _roomy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a call room for frames: at the end of a chunk of 16 KiB, Python maps and unmaps one for every inner call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=ROOM)
    return call
