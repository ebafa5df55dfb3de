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
    _hasten_types(monkeypatch, tritons)
    _hasten_operations(monkeypatch, type(tritons.interpreter_semantic))
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


def _hasten_types(monkeypatch: pytest.MonkeyPatch, tritons: Any) -> None:
    """Describe each type once: for every value the interpreter would write out its type, shape and name again."""
    core = tritons.tl.core
    monkeypatch.setattr(core.tuple, "__init__", _tuple_with(core.tuple_type))
    monkeypatch.setattr(core.tuple, "type", _TypeWhenAsked(core._type_for_tuple_values), raising=False)
    monkeypatch.setattr(core.block_type, "__init__", _block_once(core.block_type.__init__, core.tuple))
    monkeypatch.setattr(core.tensor, "__init__", _tensor_of(core.tuple, core.constexpr))
    plain, kinds = tritons._get_np_dtype, dict[str, Any]()

    def kind_of(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in kinds:
            kinds[name] = plain(dtype)
        return kinds[name]

    monkeypatch.setattr(tritons, "_get_np_dtype", kind_of)
    equal = core.dtype.__eq__
    monkeypatch.setattr(core.dtype, "__eq__", lambda self, other: self is other or equal(self, other))


def _hasten_operations(monkeypatch: pytest.MonkeyPatch, semantic: Any) -> None:
    """Values of one shape stay as they are; overflows are not computed, of which only Triton's debugging would tell."""
    widen = semantic.broadcast_impl_value

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        both = one.is_block() and other.is_block()
        same = one.shape.values == other.shape.values if both else one.is_block() == other.is_block()
        return (lhs, rhs) if same else widen(self, lhs, rhs)

    monkeypatch.setattr(semantic, "broadcast_impl_value", broadcast)
    monkeypatch.setattr(semantic, "binary_op_sanitize_overflow_impl", lambda *_: None)


class _TypeWhenAsked:
    """The type of a tuple, made when it is asked for first: most tuples are shapes that are only compared."""

    def __init__(self, describe: Callable[[Any], Any]) -> None:
        self.describe = describe

    def __get__(self, found: Any, _: type) -> Any:
        if found is None:
            return self
        described = found.__dict__["type"] = self.describe(found.values)
        return described


def _tuple_with(tuple_type: Any) -> Callable[..., None]:
    def init(self: Any, args: Any, type: Any = None) -> None:  # noqa: A002
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, tuple_type) else tuple_type(type)

    return init


def _block_once(plain: Callable[..., None], tuples: Any) -> Callable[..., None]:
    """What is known of a type of blocks is shared by all that have its elements and its shape."""
    known: dict[Any, dict[str, Any]] = {}  # it keeps the element types, too, so that none takes the place of another

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = (id(element_ty), *(shape.values if isinstance(shape, tuples) else shape))
        state = known.get(key)
        if state is None:
            plain(self, element_ty, shape)
            known[key] = self.__dict__
        else:
            self.__dict__ = state

    return init


def _tensor_of(tuples: Any, constexpr: Any) -> Callable[..., None]:
    scalar = (constexpr(1), tuples([]))

    def init(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        if type.is_block():
            if "sizes" not in type.__dict__:
                type.sizes = (constexpr(type.numel), tuples([constexpr(size) for size in type.shape]))
            self.numel, self.shape = type.sizes
        else:
            self.numel, self.shape = scalar
        self.handle, self.type, self.dtype = handle, type, type.scalar

    return init


def _roomy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a call room for frames: at the end of a chunk of 16 KiB, Python maps and unmaps one for every inner call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=ROOM)
    return call
