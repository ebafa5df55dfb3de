"""What a policy is: compiled functions that learn from events and score experts, and the state they share.

A policy file holds a NamedTuple of arrays (the state), two compiled functions and a frozen dataclass of options:

    observe(state, table, event)                   learn from one event, before victims are chosen
    score(state, table, event, layer, expert)      how much this expert is worth keeping; the lowest is evicted

`table` is the slot table of hotset.cache (read only here: `slot_of`, `expert_in`, `last`, ...). The same two functions
are compiled into the simulator's loop and into the engine's per-event call.
"""

from __future__ import annotations

import hashlib
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import IntEnum
from functools import cached_property
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, SupportsFloat, TypeVar

import numpy as np
import numpy.typing as npt
from numba import njit

from hotset.checks import choice, instance, put, shown, text, whole
from hotset.compiling import keep_compiled
from hotset.errors import PolicyError
from hotset.shape import ModelShape

if TYPE_CHECKING:
    from hotset.trace.events import EventTable

F = TypeVar("F", bound=Callable[..., Any])

Grid = npt.NDArray[np.float64]
"""One number per expert, of shape (layers, experts)."""


# Reference counts are left out: the hot path only looks at arrays that its caller holds, and counting them takes ten
# times as long as the work itself. Numba then refuses, at compile time, any code that would have to allocate.
_HOT: dict[str, Any] = {"nogil": True, "_nrt": False}
_NO_WAY_IN: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

_ON_OFF = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
_MAX = 1 << 40  # of a whole number among a policy's options; each has tighter bounds of its own


def compiled(function: F) -> F:
    """Compile a function of the hot path, to be inlined where it is called."""
    inlined: F = njit(**_HOT, forceinline=True)(function)
    return inlined


def compiled_unchecked(function: F) -> F:
    """The same for a function that divides as numpy does.

    A check for zero before every division would keep loops over experts from being vectorised.
    """
    inlined: F = njit(**_HOT, forceinline=True, error_model="numpy")(function)
    return inlined


def compiled_entry(function: F) -> F:
    """Compile a function of the hot path that Python calls, and keep the machine code on disk."""
    return keep_compiled(**_HOT)(function)


def entry_of(function: F) -> F:
    """A compiled function of the hot path as Python calls it."""
    return compiled_entry(getattr(function, "py_func", function))


class Admit(IntEnum):
    """Which experts that had to be loaded are given a slot."""

    ALWAYS = 0  # all of them, as long as something unprotected can be evicted
    SCORE = 1  # those that score higher than their victim
    LATE = 2  # the best of everything once the event is served; its own experts may be evicted, too
    FREE = 3  # only while slots are empty: nothing is ever replaced


class EventView(NamedTuple):
    """One event as the compiled functions see it."""

    layer: int
    experts: Any  # int32, rising
    counts: Any  # int32, tokens per expert
    tokens: int
    phase: int
    tick: int  # events served so far, this one included
    request: int  # whose tokens these are; of several requests in one pass the first
    routes: Any  # int32 [tokens, top_k], what each token chose, -1 for none; empty where the policy does not need it
    requests: Any  # int32 [tokens], whose each of them is


@dataclass(frozen=True, kw_only=True)
class Named:
    """What is found by its name and made from options: the fields of a policy or of a forecast.

    Keywords of the class statement become its attributes; a compiled function among them stays a function.
    """

    name: ClassVar[str]
    observe: ClassVar[Callable[..., Any]]
    state: ClassVar[Any] = None  # a NamedTuple of grids, of one that begins with zeros
    renamed: ClassVar[dict[str, str]] = {}  # hooks of earlier versions, and what they are called now

    def __init_subclass__(cls, **attributes: Any) -> None:
        super().__init_subclass__()
        for key, value in attributes.items():
            setattr(cls, key, staticmethod(value) if callable(value) else value)
        found = {old: new for old, new in cls.renamed.items() if old in vars(cls)}
        for old, new in found.items():
            setattr(cls, new or old, vars(cls)[old])
        if found:
            words = ", ".join(f"{old} is {new or 'not called any more'}" for old, new in found.items())
            warnings.warn(f"{cls.__name__} has hooks of an earlier version: {words}", DeprecationWarning, 2)

    def __post_init__(self) -> None:
        check_options(self)
        self.check()

    def check(self) -> None:
        """Raise PolicyError for options that make no sense."""

    def start(self, shape: ModelShape) -> Any:
        """Fresh state for a model of this shape: grids of zeros, unless a policy or forecast says more."""
        kind = type(self).state
        if kind is None:
            raise PolicyError(f"{self.name} does not say how to start")
        return kind(*(np.zeros((shape.layers, shape.experts)) for _ in kind._fields))

    @property
    def spec(self) -> str:
        """The shortest text that parses to this again."""
        changed = [
            f"{f.name}={_show(getattr(self, f.name))}" for f in fields(self) if getattr(self, f.name) != f.default
        ]
        return self.name + (":" + ",".join(changed) if changed else "")

    def require(self, ok: bool, what: str) -> None:
        """Raise PolicyError naming the policy or forecast and what it wants unless `ok`."""
        if not ok:
            raise PolicyError(f"{self.name}: {what}")


@dataclass(frozen=True, kw_only=True)
class Policy(Named):
    """The options of a policy; subclasses add theirs and say how to start."""

    score: ClassVar[Callable[..., Any]]
    offline: ClassVar[bool] = False  # needs the future
    needs_counts: ClassVar[bool] = False  # does nothing of its own without counts of earlier requests
    persisted: ClassVar[dict[str, str]] = {}  # what of the state goes into a profile: its name, and "sum" or "mean"
    needs_routes: ClassVar[bool] = False  # looks at what each token chose, not only at what all together need
    collects_requests: ClassVar[bool] = False  # its state holds the activation matrices of requests, for a profile
    renamed: ClassVar[dict[str, str]] = {
        "foresee": "with_future", "foresees": "can_serve", "carries": "persisted", "shield": "", "teach": "",
    }  # fmt: skip
    admit: str = "always"

    def __post_init__(self) -> None:
        super().__post_init__()
        choice(self.admit.lower(), Admit, f"{self.name}: admit", PolicyError)

    def with_future(self, state: Any, events: EventTable) -> Any:  # noqa: ARG002 - for policies that need the future
        """State for a replay of exactly these events; only offline policies look at them."""
        return state

    def can_serve(self, state: Any, experts: int) -> bool:  # noqa: ARG002 - for policies that need the future
        """Whether the next event, of so many experts, can be served; policies of the present always can."""
        return True

    @cached_property
    def admission(self) -> Admit:
        """The admission rule by its enum."""
        return Admit[self.admit.upper()]


def check_options(holder: Any) -> None:
    """Make every option of a policy or forecast the type of its default, or raise PolicyError."""
    for option in fields(holder):
        value = getattr(holder, option.name)
        kind: type[Any] = type(option.default)
        what = f"{holder.name}: {option.name}"
        if kind is bool:
            instance(value, bool, what, PolicyError)
        elif kind is int:
            put(holder, **{option.name: whole(value, what, -_MAX, _MAX, PolicyError)})
        elif kind is float and (isinstance(value, bool | str) or not isinstance(value, SupportsFloat)):
            raise PolicyError(f"{what} must be a number, not {shown(value)}")
        elif kind is float:
            put(holder, **{option.name: float(value)})
        elif kind is str and isinstance(value, int | float) and not isinstance(value, bool):
            put(holder, **{option.name: f"{value:g}" if isinstance(value, float) else str(value)})
        elif kind is str:
            text(value, what, PolicyError)


def modules_in(path: Iterable[str]) -> list[str]:
    """The files of a package that hold one policy or forecast each, by name, without importing them."""
    found = (module.name for module in iter_modules(path))
    return sorted(name for name in found if name != "base" and not name.startswith("_"))


def parse_named(spec: str, kind: str, package: str, names: Sequence[str]) -> Any:
    """Make a policy or a forecast from text: a name, then options, as in "decay:half_life=8"."""
    name, _, rest = text(spec, f"a {kind}", PolicyError).strip().partition(":")
    if name not in names:
        raise PolicyError(f'no {kind} is called "{name:.60}"; there are {", ".join(names)}')
    cls = getattr(import_module(f"{package}.{name}"), kind.upper())
    return cls(**parse_options(cls, rest))


def parse_options(cls: type[Any], text_of_options: str) -> dict[str, Any]:
    """The options of a policy or forecast from text, as in "half_life=8,admit=score"."""
    return dict(_option(cls, part) for part in text_of_options.split(",") if part.strip())


def _option(cls: type[Any], part: str) -> tuple[str, Any]:
    key, equals, word = (side.strip() for side in part.partition("="))
    defaults = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
    if not defaults:
        raise PolicyError(f'{cls.name} has no options, so not "{part.strip()}"')
    if not equals or key not in defaults:
        raise PolicyError(f'{cls.name} has no option "{key}"; it has {", ".join(defaults)} (write name=value)')
    return key, _convert(cls, key, word, type(defaults[key]))


def _convert(cls: type[Any], key: str, word: str, kind: type) -> Any:
    if kind is bool:
        if word.lower() not in _ON_OFF:
            raise PolicyError(f'{cls.name}: {key} is on or off, not "{word}"')
        return _ON_OFF[word.lower()]
    try:
        return kind(word)
    except (ValueError, OverflowError):
        raise PolicyError(f'{cls.name}: {key} must be a number, not "{word}"') from None


def bind(
    templates: Sequence[Callable[..., Any]],
    entries: Sequence[Callable[..., Any]],
    names: dict[str, Any],
    tag: str,
    sources: Sequence[Path],
) -> dict[str, Any]:
    """Compile templates, in the order in which they call each other, with these names bound.

    Numba caches machine code on disk under a function's qualified name and does not look at what the function calls;
    the name therefore carries a digest of every source file involved, and nothing is served from a stale cache.
    """
    space = dict(names)
    suffix = f"{tag}{digest_of(sources)}"
    for template in templates:
        bound = types.FunctionType(template.__code__, space, template.__name__, template.__defaults__)
        bound.__qualname__ = f"{template.__name__}_{suffix}"
        space[template.__name__] = compiled_entry(bound) if template in entries else _compiled_inside(bound)
    return space


def _compiled_inside(function: F) -> F:
    """Compile a function that only compiled ones call: without a way in from Python, it takes half the time."""
    inside: F = njit(**_HOT, **_NO_WAY_IN, forceinline=True)(function)
    return inside


def digest_of(sources: Sequence[Path]) -> str:
    """A short hash of source files."""
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]


def save_state(state: Any) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a policy's state by name, copied."""
    return {name: array.copy() for name, array in state._asdict().items()}


def restore_state(state: Any, saved: dict[str, npt.NDArray[Any]]) -> None:
    """Overwrite a fresh state with a saved one of the same policy and model shape."""
    for name, array in state._asdict().items():
        if name not in saved or saved[name].shape != array.shape or saved[name].dtype != array.dtype:
            raise PolicyError(f"the saved state does not fit: {name!r} is missing or of another shape")
    for name, array in state._asdict().items():
        array[...] = saved[name]


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
