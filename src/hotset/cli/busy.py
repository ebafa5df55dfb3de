"""On a machine that others keep busy, threads that wait for each other sleep instead of spinning.

OpenMP's threads spin by default, which is fast where each has a core of its own. Where one has to wait for its core,
the others burn theirs meanwhile.
"""

from __future__ import annotations

import os

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""What says how OpenMP's threads wait; one that is set is left as it is."""


def wait_without_spinning_if_busy() -> None:
    """Set how threads wait, before torch is imported, which reads it once; a quiet machine is left as it is."""
    if is_busy() and not any(name in os.environ for name in _WAITING):
        os.environ["OMP_WAIT_POLICY"] = "passive"


def is_busy() -> bool:
    """Whether, over the last minute, more threads wanted a core than there are."""
    try:
        return os.getloadavg()[0] > (os.cpu_count() or 1)
    except OSError:  # the system does not say
        return False
