"""Ctrl-C while a model works: it ends the answer between two tokens, or the prompt between two layers.

Never in the middle of a layer: the cache would take an expert for resident that was still on its way.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

from hotset.errors import StopAsked


class Stopped(StopAsked):
    """The person asked to stop before the first token was there."""


class Interrupt:
    """Within the block Ctrl-C asks to stop; the second one leaves at once."""

    def __init__(self, model: Any) -> None:
        self.asked = False
        self.begun = False  # whether there is an answer to keep
        self._model = model
        self._hooks: list[Any] = []
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)
        self._hooks = [layer.register_forward_pre_hook(self._between_layers) for layer in _layers(self._model)]
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        for hook in self._hooks:
            hook.remove()

    def criterion(self, ids: Any, scores: Any) -> Any:  # noqa: ARG002 - as transformers calls it
        """Whether each sequence ends here, as a stopping criterion of transformers."""
        import torch

        return torch.full((ids.shape[0],), self.asked, dtype=torch.bool, device=ids.device)

    def _ask(self, number: int, frame: Any) -> None:  # noqa: ARG002 - as signals are delivered
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def _between_layers(self, *_: Any) -> None:
        if self.asked and not self.begun:
            raise Stopped


class Leaving:
    """Within the block Ctrl-C leaves, at the next check at the latest: imports of large libraries swallow it."""

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None

    def __enter__(self) -> Leaving:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Leave if that was asked for."""
        if self._asked:
            raise KeyboardInterrupt

    def _ask(self, number: int, frame: Any) -> None:  # noqa: ARG002 - as signals are delivered
        self._asked = True
        raise KeyboardInterrupt


def _layers(model: Any) -> list[Any]:
    """The decoder layers, found as the lists that have as many modules as the config says."""
    import torch

    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    return [layer for each in lists for layer in each]
