"""The slot table and the policy's state as tensors: copies of the host's arrays, of the same names and types."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hotset.cache.controller import Controller
from hotset.cache.table import Table
from hotset.errors import HotsetError

Tensor = torch.Tensor

CHANGED = ("slot_of", "layer_in", "expert_in", "num_free", "resident", "last", "passes", "clock")
"""What events change in the table; the rest is only read. Counters and statistics stay on the host."""


class DeviceTable:
    """A residency on a device.

    It takes 12 bytes for each expert of the model and 12 for each slot, and beside that the policy's state: 8 bytes
    for each expert under lru, lfu and decay, 16 under lfru, 17 under slru, and 164 under blend, with transitions
    another 4 times the experts of a layer. For 48 layers of 128 experts under blend that is about 4 MiB. Under nextuse
    it is some 60 MiB: rows of weights, and what is kept of 16 requests.
    """

    def __init__(self, table: Table, state: Any) -> None:
        self.table = table
        self.state = state

    @classmethod
    def upload(cls, controller: Controller, device: torch.device | str) -> DeviceTable:
        """Copies of a controller's arrays on a device."""
        _refuse_reserved(controller)
        return cls(_copies(controller.table, device), _copies(controller.state, device))

    def refresh(self, controller: Controller) -> None:
        """Take the host's arrays over again, in place: a captured graph knows the tensors by their address."""
        _refuse_reserved(controller)
        for mine, theirs in zip(self._all(), (*controller.table, *controller.state), strict=True):
            mine.copy_(torch.from_numpy(theirs))

    def download(self, controller: Controller) -> None:
        """Write what has changed here into the arrays of the controller, in place."""
        for name in CHANGED:
            np.copyto(getattr(controller.table, name), getattr(self.table, name).cpu().numpy())
        for theirs, mine in zip(controller.state, self.state, strict=True):
            np.copyto(theirs, mine.cpu().numpy())

    @property
    def device(self) -> torch.device:
        """Where the copies lie."""
        found: torch.device = self.table.slot_of.device
        return found

    @property
    def size_bytes(self) -> int:
        """The memory that the copies take."""
        return sum(tensor.nbytes for tensor in self._all())

    def _all(self) -> tuple[Tensor, ...]:
        return (*self.table, *self.state)


def _copies(arrays: Any, device: torch.device | str) -> Any:
    """The same named tuple, of tensors."""
    return type(arrays)(*(torch.from_numpy(array).to(device, copy=True) for array in arrays))


def _refuse_reserved(controller: Controller) -> None:
    """The device finds residents by expert, and would not see one for which a slot is reserved."""
    if controller.residency.reserved:
        raise HotsetError("experts are on their way to slots held for them: wait until they have arrived")
