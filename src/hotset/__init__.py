"""hotset runs Mixture-of-Experts models larger than memory and proves by replay what it saves."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hotset._version import __version__

if TYPE_CHECKING:
    from hotset import reference, report
    from hotset.errors import HotsetError
    from hotset.models.attach import attach, detach
    from hotset.models.load import load
    from hotset.shape import Budget, ExpertKey, ModelShape
    from hotset.sim.simulate import simulate
    from hotset.trace import Event, Phase, Trace

_HOMES = {
    "Budget": "hotset.shape",
    "Event": "hotset.trace",
    "ExpertKey": "hotset.shape",
    "HotsetError": "hotset.errors",
    "ModelShape": "hotset.shape",
    "Phase": "hotset.trace",
    "Trace": "hotset.trace",
    "attach": "hotset.models.attach",
    "detach": "hotset.models.attach",
    "load": "hotset.models.load",
    "simulate": "hotset.sim",
}

__all__ = [
    "Budget",
    "Event",
    "ExpertKey",
    "HotsetError",
    "ModelShape",
    "Phase",
    "Trace",
    "__version__",
    "attach",
    "detach",
    "load",
    "reference",
    "report",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import hotset` stays fast."""
    if name in ("reference", "report"):
        return import_module(f"hotset.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'hotset' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
