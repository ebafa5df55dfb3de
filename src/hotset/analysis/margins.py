"""How clearly routers chose, as far as a trace can tell: it holds the weights of the chosen experts only.

The weights of each token are taken as shares of their sum, since models differ in whether they renormalise them. The
weight of the first expert that was not chosen is not recorded; it is at most that of the last chosen one, so the margin
of the choice lies between 0 and the last share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hotset.analysis.tallies import Floats
from hotset.trace import Trace

QUANTILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True, eq=False)
class Margins:
    """The weights of the chosen experts, largest first; figures of layers without weights are not numbers."""

    share: Floats  # [layers, top_k], mean share of the token's weights by rank
    weight_sum: Floats  # [layers], mean sum of the weights as they were recorded
    first_gap: Floats  # [layers, quantiles], the largest share minus the second; not a number for top 1
    last_share: Floats  # [layers, quantiles], the smallest share among the chosen

    def by_layer(self) -> list[dict[str, Any]]:
        """Each layer in numbers."""
        return [
            {
                "layer": layer,
                "mean_share_by_rank": self.share[layer].tolist(),
                "mean_weight_sum": float(self.weight_sum[layer]),
                "gap_first_second": dict(zip(_NAMES, self.first_gap[layer].tolist(), strict=True)),
                "share_of_last": dict(zip(_NAMES, self.last_share[layer].tolist(), strict=True)),
            }
            for layer in range(len(self.share))
        ]


_NAMES = tuple(f"p{100 * quantile:.0f}" for quantile in QUANTILES)


def measure_margins(trace: Trace) -> Margins | None:
    """The weights of the chosen experts layer by layer; None where the trace has none."""
    if trace.weights is None:
        return None
    layers, top_k = trace.shape.layers, trace.shape.top_k
    found = Margins(
        np.full((layers, top_k), np.nan), np.full(layers, np.nan),
        np.full((layers, len(QUANTILES)), np.nan), np.full((layers, len(QUANTILES)), np.nan),
    )  # fmt: skip
    for layer in range(layers):
        _measure_layer(trace, layer, found)
    return found


def _measure_layer(trace: Trace, layer: int, found: Margins) -> None:
    """Fill in one layer, of the tokens that have all their weights."""
    assert trace.weights is not None  # noqa: S101 - asked for only with weights
    weights = trace.weights[:, layer].astype(np.float32)
    total = weights.sum(axis=1)
    whole = (trace.experts[:, layer] >= 0).all(axis=1) & (total > 0)
    if not whole.any():
        return
    ordered = -np.sort(-weights[whole], axis=1)
    share = ordered / total[whole, None]
    found.share[layer] = share.mean(axis=0, dtype=np.float64)
    found.weight_sum[layer] = total[whole].mean(dtype=np.float64)
    found.last_share[layer] = np.quantile(share[:, -1], QUANTILES)
    if share.shape[1] > 1:
        found.first_gap[layer] = np.quantile(share[:, 0] - share[:, 1], QUANTILES)
