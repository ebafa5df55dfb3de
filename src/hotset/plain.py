"""Values as JSON can say them."""

from __future__ import annotations

import math
from typing import Any


def plain(value: Any) -> Any:
    """Make numpy scalars plain, and what JSON cannot say null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
