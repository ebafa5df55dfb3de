"""Traces as data frames; pandas is imported when one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hotset.errors import HotsetError
from hotset.trace.event import Phase

if TYPE_CHECKING:
    from hotset.trace.trace import Trace


def pandas() -> Any:
    """The library, or an error that says how to get it."""
    try:
        import pandas as library
    except ImportError:
        raise HotsetError("data frames need pandas: pip install 'hotset[pandas]'") from None
    return library


def trace_frame(trace: Trace) -> Any:
    """A row for each expert of each token and layer; labels of requests are columns of their own."""
    library = pandas()
    token, layer, rank = (side.astype(np.int32) for side in np.nonzero(trace.experts >= 0))
    columns = {
        "request": trace.request[token], "step": trace.step[token], "token": token,
        "phase": library.Categorical.from_codes(trace.phase[token], [phase.name.lower() for phase in Phase]),
        "layer": layer, "rank": rank, "expert": trace.experts[token, layer, rank],
    }  # fmt: skip
    if trace.weights is not None:
        columns["weight"] = trace.weights[token, layer, rank].astype(np.float32)
    if trace.token_ids is not None:
        columns["token_id"] = trace.token_ids[token]
    for key in dict.fromkeys(key for label in trace.labels for key in label):
        values = library.Categorical([label.get(key) for label in trace.labels])
        columns[key if key not in columns else f"label_{key}"] = values[trace.request[token]]
    return library.DataFrame(columns)
