"""Host memory that a GPU copies from at full speed, and what happens where the system refuses it."""

from __future__ import annotations

import torch

from hotset.runtime.arena import Arena


def pin(arena: Arena) -> bool:
    """Lock an arena's pages for the GPU; false where the system refuses, and copies then go slower."""
    if not arena.size_bytes:
        return True
    code = torch.cuda.cudart().cudaHostRegister(arena.memory.data_ptr(), arena.size_bytes, 0)  # type: ignore[no-untyped-call]
    return int(code) == 0


def unpin(arena: Arena) -> None:
    """Unlock what was locked."""
    torch.cuda.cudart().cudaHostUnregister(arena.memory.data_ptr())  # type: ignore[no-untyped-call]
