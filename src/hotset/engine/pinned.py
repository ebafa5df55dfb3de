"""Host memory that a GPU copies from at full speed, and what happens where the system refuses it."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import torch

from hotset.engine.arena import Arena


def page_lock(arena: Arena, device: torch.device) -> bool:
    """Lock an arena's pages for the GPU; false where the system refuses, and copies then go slower.

    They are unlocked with the memory's own lifetime: memory that was given back while it is locked keeps its addresses
    registered, and CUDA refuses whatever is allocated there next.
    """
    if not arena.size_bytes:
        return True
    address = arena.memory.data_ptr()
    code = torch.cuda.cudart().cudaHostRegister(address, arena.size_bytes, 0)  # type: ignore[no-untyped-call]
    if int(code) != 0:
        _clear_error(device)
        return False
    arena.before_release(partial(_unlock, address, device))
    return True


def _unlock(address: int, device: torch.device) -> None:
    """Unlock pages, once no copy reads them any more; where CUDA is gone already, its locks are, too."""
    with suppress(Exception):
        torch.cuda.synchronize(device)
        if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:  # type: ignore[no-untyped-call]
            _clear_error(device)


def _clear_error(device: torch.device) -> None:
    """Take back the error of a call that was refused: it would be reported by the next kernel that is launched."""
    with suppress(RuntimeError):
        torch.empty(1, device=device).zero_()
