"""Runs a compiled function in torch's own threads.

Threads of another library would compete with torch's for the processor's cores: for a while after each of its own
operations torch's wait without sleeping.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_int64)


def run(function: int, arguments: int, most: int) -> None:
    """Call the function at an address with one argument in torch's threads, at most so many; returns when all have."""
    threads = min(torch.get_num_threads(), most)
    pool = _pool() if threads > 1 else None
    if pool is None:
        _callable(function)(arguments)
    else:
        pool(function, arguments, threads, 0)


@cache
def _callable(function: int) -> Callable[[int], None]:
    called: Callable[[int], None] = _FUNCTION(function)
    return called


@cache
def _pool() -> Callable[[int, int, int, int], None] | None:
    """What starts a parallel region in the OpenMP library that torch is linked to; None if that has another face."""
    try:
        found: Any = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    started: Callable[[int, int, int, int], None] = found
    return started
