"""The device that a name stands for."""

from __future__ import annotations

import torch

from hotset.errors import HotsetError
from hotset.options.run import AUTO


def torch_device(name: str) -> torch.device:
    """The device to compute on, or one line on why it cannot be."""
    if name == AUTO:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise HotsetError(f"no device is called {name!r}: use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise HotsetError("no CUDA device is here: leave --device out, or use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise HotsetError(f"there is no {device}: the last device here is cuda:{torch.cuda.device_count() - 1}")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise HotsetError("no MPS device is here: leave --device out, or use --device cpu")
    if device.type not in ("cpu", "cuda", "mps"):
        raise HotsetError(f"hotset does not run on {device.type}: use cpu or cuda")
    return device
