"""What a model refuses that runs, or ran, through hotset: calls once it is closed, and copies of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from hotset.errors import ClosedError, ModelError
from hotset.runtime.engine import Engine

_CALLS = ("forward", "generate", "save_pretrained")
_COPIES = ("__deepcopy__", "__reduce_ex__")  # asked of the instance by copy and pickle alike

Undo = Callable[[], None]


def refuse_calls(model: Any) -> Undo:
    """Have a model refuse whatever would run or save it without its experts; returns what undoes it.

    Its layers, called by themselves, are refused by the engine.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ClosedError

    return _put(model, [name for name in _CALLS if hasattr(model, name)], torch.compiler.disable(refuse))  # type: ignore[no-untyped-call]


def refuse_copies(model: Any) -> Undo:
    """Have a model refuse to be copied or pickled: threads, files and slots have no second copy."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ModelError(
            "a model that runs through hotset cannot be copied or pickled: load it a second time, "
            "or make it whole first by hotset.detach(model)"
        )

    return _put(model, _COPIES, refuse)


def refuse_in_children(model: Any, engine: Engine) -> Undo:
    """Have calls of a model refused in forked processes, before anything else looks at them."""

    def check(*_: Any) -> None:
        engine.owner.check()

    handle = model.register_forward_pre_hook(check, prepend=True)
    return lambda: handle.remove()


def _put(model: Any, names: Any, function: Callable[..., Any]) -> Undo:
    own = vars(model)
    before = {name: own[name] for name in names if name in own}
    own.update(dict.fromkeys(names, function))

    def undo() -> None:
        for name in names:
            own.pop(name, None)
        own.update(before)

    return undo
