"""How an answer is stopped: between two tokens, or a prompt between two layers, and what is there is kept.

Never in the middle of a layer, so that an answer ends where a step ends; the engine would repair that, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hotset.errors import StopAsked


class Stop:
    """A request to stop, which a signal handler or another thread makes and generation looks at."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self) -> None:
        """Stop as soon as that leaves everything whole."""
        self.asked = True


class Stopped(StopAsked):
    """Generation was asked to stop before the first token was there."""


class StopWatch:
    """Looks at a request to stop while a model generates."""

    def __init__(self, stop: Stop) -> None:
        self.stop = stop
        self.begun = False  # whether there is an answer to keep

    def criterion(self, ids: Any, scores: Any) -> Any:  # noqa: ARG002 - as transformers calls it
        """Whether each sequence ends here, as a stopping criterion of transformers."""
        import torch

        return torch.full((ids.shape[0],), self.stop.asked, dtype=torch.bool, device=ids.device)

    def between_layers(self, *_: Any) -> None:
        """A hook of layers: end a prompt that is under way."""
        if self.stop.asked and not self.begun:
            raise Stopped


@contextmanager
def watching(model: Any, stop: Stop) -> Iterator[StopWatch]:
    """Have the layers of a model look at a request to stop."""
    watch = StopWatch(stop)
    hooks = [layer.register_forward_pre_hook(watch.between_layers) for layer in _layers(model)]
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


def _layers(model: Any) -> list[Any]:
    """The decoder layers, found as the lists that have as many modules as the config says."""
    import torch

    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    return [layer for each in lists for layer in each]
