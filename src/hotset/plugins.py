"""Policies and forecasts of users: a file that is named where a policy is, or an entry point of an installed package.

They become modules of `hotset.policies` and `hotset.forecasts`, which find their members by the files of their
folders: each gets one more place to look, with a finder of Python's import system that knows what was registered here.
Nothing is imported before it is asked for by name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from importlib.abc import Loader, PathEntryFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from hotset.errors import PolicyError
from hotset.reading import TooLargeError, read_bounded

PACKAGES = {"policy": "hotset.policies", "forecast": "hotset.forecasts"}
"""Where each kind lives; entry points are in groups of the same names."""

_FILE = re.compile(r"(.+\.py)(:.*)?", re.DOTALL)
_NAMED_PLACE = re.compile(r'^(?:During: .* at (/.+\.py) \((\d+)\)|\s*File "(.+\.py)", line (\d+):)', re.MULTILINE)
_HOOKS = ("score", "probabilities", "observe")
_PLACE = "hotset.plugins:"
_MODULE = "hotset_plugin_"
_MAX_BYTES = 4 << 20

_files: dict[str, dict[str, Any]] = {kind: {} for kind in PACKAGES}  # classes that files defined, by name


def resolve(spec: str, kind: str = "policy") -> str:
    """The text of a policy or forecast with a file in it, "./mru.py:admit=score", as text with its name in it.

    The file is run and must define POLICY, or FORECAST. Text without a file stays as it is; entry points are known
    from here on.
    """
    install()
    found = _FILE.fullmatch(spec) if isinstance(spec, str) else None
    return spec if found is None else load_file(Path(found[1]).expanduser(), kind) + (found[2] or "")


def install() -> None:
    """Make entry points, and what files define, known to `hotset.policies` and `hotset.forecasts`."""
    if _finder not in sys.path_hooks:
        sys.path_hooks.append(_finder)
    for kind, package in PACKAGES.items():
        places = import_module(package).__path__
        if _PLACE + kind not in places:
            sys.path_importer_cache.pop(_PLACE + kind, None)
            places.append(_PLACE + kind)


def load_file(path: Path, kind: str) -> str:
    """Run a file that defines a policy or forecast, and return the name that it is known by from here on."""
    install()
    try:
        data = read_bounded(path, _MAX_BYTES)
    except TooLargeError as error:
        raise PolicyError(f"{path} holds no {kind}: {error}") from None
    except FileNotFoundError:
        raise PolicyError(f"there is no file {path}: name one that defines {kind.upper()}") from None
    except OSError as error:
        raise PolicyError(f"cannot read {path}: {error.strerror or error}") from None
    name = f"{_MODULE}{hashlib.sha256(data).hexdigest()[:16]}"  # one name, so that compiled code is found again
    module = sys.modules.get(name) or _run(path, name)
    cls = _checked(getattr(module, kind.upper(), None), kind, str(path))
    own = {*import_module(PACKAGES[kind]).names()} - _files[kind].keys()
    if cls.name in own:
        raise PolicyError(f'{path} defines a {kind} called "{cls.name}", which there is already: call it otherwise')
    if _files[kind].get(cls.name) is not cls:
        _files[kind][cls.name] = cls
        sys.modules.pop(f"{PACKAGES[kind]}.{cls.name}", None)
    return str(cls.name)


def registered(kind: str) -> list[str]:
    """The names of what files and entry points define."""
    return sorted(_files[kind].keys() | _entries(kind).keys())


def file_of(cls: type) -> str | None:
    """The file that a class was named by, if it is of one."""
    module = sys.modules.get(cls.__module__)
    return str(module.__file__) if module is not None and cls.__module__.startswith(_MODULE) else None


def uncompilable(error: BaseException) -> PolicyError | None:
    """What Numba refuses in the code of a user, as one line that names the place; None for any other error."""
    errors = sys.modules.get("numba.core.errors")
    if errors is None or not isinstance(error, errors.NumbaError):
        return None
    place = next(filter(_is_foreign, (*_places(str(error)), *_begun(str(error)))), None)
    if place is None:
        return None
    path, line = place
    code, why = linecache.getline(str(path), line).strip()[:80], _reason(str(error))
    return PolicyError(
        f'{path}, line {line}: Numba cannot compile "{code}" ({why}): write it with numbers, arrays and loops, as '
        "docs/guide/own-policy.md says under Compiled code"
    )


def _places(text: str) -> Iterator[tuple[Path, int]]:
    """The files and lines that a message of Numba names, the innermost first."""
    for found in _NAMED_PLACE.finditer(text):
        yield Path(found[1] or found[3]).resolve(), int(found[2] or found[4])


def _begun(text: str) -> Iterator[tuple[Path, int]]:
    """Where those functions of users begin that a message names, without a line, as what was to be compiled."""
    modules = [(kind, sys.modules.get(f"{PACKAGES[kind]}.{name}")) for kind in PACKAGES for name in registered(kind)]
    classes = [getattr(module, kind.upper(), None) for kind, module in modules]
    functions: list[Any] = [getattr(getattr(cls, name, None), "py_func", None) for cls in classes for name in _HOOKS]
    for function in functions:
        if function is not None and repr(function) in text:
            path, line = function.__code__.co_filename, function.__code__.co_firstlineno
            while linecache.getline(path, line).lstrip().startswith("@"):
                line += 1
            yield Path(path).resolve(), line


def _is_foreign(place: tuple[Path, int]) -> bool:
    """Whether code is neither Numba's nor hotset's."""
    own = (Path(str(sys.modules[name].__file__)).resolve().parent for name in ("numba", "hotset"))
    return not any(place[0].is_relative_to(folder) for folder in own)


def _reason(text: str) -> str:
    """What Numba says first beside that it failed."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return next((line.rstrip(" .:")[:160] for line in lines if line and not line.startswith("Failed in")), "")


def _run(path: Path, name: str) -> ModuleType:
    """Run a file as a module; it stays among Python's modules, since compiled code is looked up by its source."""
    spec = importlib.util.spec_from_file_location(name, path, loader=SourceFileLoader(name, str(path.resolve())))
    assert spec is not None  # noqa: S101 - there is a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        _guarded(lambda: spec.loader.exec_module(module), str(path))  # type: ignore[union-attr]
    except PolicyError:
        del sys.modules[name]
        raise
    return module


def _guarded(work: Callable[[], Any], where: str) -> Any:
    """Do what runs code of users; whatever it raises is told in one line."""
    try:
        return work()
    except PolicyError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise PolicyError(f"{where} does not work: {type(error).__name__}: {why}") from error


def _checked(cls: Any, kind: str, where: str) -> Any:
    wanted = getattr(import_module(PACKAGES[kind]), kind.capitalize())
    if not (isinstance(cls, type) and issubclass(cls, wanted)):
        raise PolicyError(f"{where} does not define {kind.upper()}, a class that derives from {wanted.__name__}")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise PolicyError(f'{where}: {cls.__name__} has no name of letters, digits and "-": class X({kind}, name=...)')
    return cls


@cache
def _entries(kind: str) -> dict[str, EntryPoint]:
    """The entry points of a kind; two of one name are told apart by nothing, so the first counts."""
    found = {entry.name: entry for entry in reversed(tuple(entry_points(group=PACKAGES[kind])))}
    own = Path(import_module(PACKAGES[kind]).__file__ or "").parent
    return {name: entry for name, entry in found.items() if not (own / f"{name}.py").exists()}


def _class_of(kind: str, name: str) -> Any:
    """The class of a name: of a file, or of an entry point that names it or its module."""
    if name in _files[kind]:
        return _files[kind][name]
    entry = _entries(kind)[name]
    where = f"the entry point {name} ({entry.value})"
    loaded = _guarded(entry.load, where)
    cls = _checked(getattr(loaded, kind.upper(), None) if isinstance(loaded, ModuleType) else loaded, kind, where)
    if cls.name != name:
        raise PolicyError(f'{where} is of a {kind} called "{cls.name}": the two names must be the same')
    return cls


class _Loader(Loader):
    """Fills a module with the class that was registered under its name."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its POLICY or FORECAST."""
        setattr(module, self.kind.upper(), _class_of(self.kind, self.name))


class _Finder(PathEntryFinder):
    """Finds what is registered of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002 - Python's
        """How to import one by its name."""
        name = fullname.rpartition(".")[2]
        return ModuleSpec(fullname, _Loader(self.kind, name)) if name in registered(self.kind) else None

    def iter_modules(self, prefix: str = "") -> Iterator[tuple[str, bool]]:
        """All of them, as `pkgutil.iter_modules` asks for them."""
        return ((prefix + name, False) for name in registered(self.kind))


def _finder(place: str) -> _Finder:
    if not place.startswith(_PLACE):
        raise ImportError(place)
    return _Finder(place.removeprefix(_PLACE))
