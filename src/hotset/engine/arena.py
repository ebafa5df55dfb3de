"""The memory of all slots: allocated once, never grown, every slot on a page of its own."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hotset.engine.memory import available_memory_bytes
from hotset.errors import BudgetError, HotsetError
from hotset.formats import element_type
from hotset.shape import format_size
from hotset.store import Part
from hotset.store.catalog import Bytes

_LIBC = ctypes.CDLL(None)


class Block(mmap.mmap):
    """Memory of the system that has something undone before it is given back, with or without a `close`."""

    before_release: tuple[Callable[[], None], ...] = ()

    def release(self) -> None:
        """Have undone what was done to the memory; more than once does no harm."""
        undo, self.before_release = self.before_release, ()
        for each in undo:
            each()

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of the interpreter much is gone already
            self.release()


@dataclass(frozen=True, eq=False)
class Arena:
    """So many slots of equal size in one block of memory."""

    slots: int
    slot_bytes: int
    memory: torch.Tensor  # uint8 [slots * slot_bytes]
    block: Block | None = None  # the memory's owner, where it is the system's

    @classmethod
    def in_ram(cls, slots: int, slot_bytes: int, *, force: bool = False) -> Arena:
        """Slots in ordinary memory, in huge pages where there are any; `force` asks even where no memory is free."""
        size = slots * slot_bytes
        room = available_memory_bytes()
        if size > room and not force:
            raise BudgetError(
                f"{slots} slots need {format_size(size)} of memory and {format_size(room)} are available: "
                "ask for a smaller --memory, or close other programs"
            )
        try:
            block = Block(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise BudgetError(
                f"the system refused {format_size(size)} of memory ({error}): ask for a smaller --memory"
            ) from error
        with suppress(AttributeError, OSError, ValueError):  # huge pages are a help, not a need
            block.madvise(mmap.MADV_HUGEPAGE)
        return cls(slots, slot_bytes, torch.frombuffer(block, dtype=torch.uint8), block)

    def before_release(self, undo: Callable[[], None]) -> None:
        """Have something undone before the memory is given back."""
        if self.block is None:
            raise HotsetError("only memory of the system can be locked")
        self.block.before_release += (undo,)

    def release(self) -> None:
        """Undo what was to be undone before the memory is given back, and give its pages back: it holds zeros then.

        The addresses stay as long as anything refers to them, so that nothing can read the memory of others.
        """
        if self.block is not None:
            self.block.release()
            with suppress(AttributeError, OSError, ValueError):  # not every system gives back pages
                self.block.madvise(mmap.MADV_DONTNEED)

    @classmethod
    def on_device(cls, slots: int, slot_bytes: int, device: torch.device) -> Arena:
        """Slots in the memory of a GPU."""
        size = slots * slot_bytes
        try:
            return cls(slots, slot_bytes, torch.empty(size, dtype=torch.uint8, device=device))
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise BudgetError(
                f"the {device.type} device refused {format_size(size)} for {slots} slots: "
                "ask for a smaller --memory, or close other programs that use it"
            ) from error

    def view(self, part: Part) -> torch.Tensor:
        """One tensor of all slots, of shape (slots, *part.shape)."""
        dtype = element_type(part.dtype)
        flat = self.memory.view(dtype)
        strides = torch.empty(part.shape, device="meta").stride()
        return flat.as_strided(
            (self.slots, *part.shape), (self.slot_bytes // dtype.itemsize, *strides), part.offset // dtype.itemsize
        )

    def rows(self) -> Bytes:
        """The bytes of all slots, of shape (slots, slot_bytes); for memory that the CPU can reach."""
        rows: Bytes = self.memory.numpy().reshape(self.slots, self.slot_bytes)
        return rows

    def untouched_bytes(self) -> int:
        """What of this memory the system has not handed out yet, as it does when a page is first written to."""
        pages = -(-self.size_bytes // mmap.PAGESIZE)
        here = np.zeros(pages, np.uint8)
        address, size = ctypes.c_void_p(self.memory.data_ptr()), ctypes.c_size_t(self.size_bytes)
        if not hasattr(_LIBC, "mincore") or _LIBC.mincore(address, size, here.ctypes.data_as(ctypes.c_void_p)) != 0:
            return 0
        return (pages - int(np.count_nonzero(here & 1))) * mmap.PAGESIZE

    @property
    def size_bytes(self) -> int:
        """All bytes of all slots."""
        return self.slots * self.slot_bytes


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


def poison(arena: Arena) -> None:
    """Fill all slots with not-a-number bytes, so that a test sees any use of what was never loaded."""
    arena.memory.fill_(0xFF)
