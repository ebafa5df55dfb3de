"""The layers compared: their hit rates, and how far few experts take most of the uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hotset.report.heat_words import UNDER, shares, write_note
from hotset.report.plot_style import GREY, PALE
from hotset.report.words import percent
from hotset.trace import Phase

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hotset.profile.statistics import Statistics

DECODE, PREFILL = "#0072B2", "#56B4E9"
_TOLD = 0.25  # the share of experts of which the title speaks
_LARGEST_DOT = 5.0
_DOTS = 250.0  # points of height that all dots share


def draw_layers(axes: Axes, statistics: Statistics) -> bool:
    """Draw the hit rate of each layer; whether there was anything to draw."""
    axes.set_title("Hit rate by layer")
    rates = {phase: 100 * statistics.layer_hit_rates(phase) for phase in Phase}
    if not any(np.isfinite(found).any() for found in rates.values()):
        write_note(axes, "no hits or\nmisses counted")
        return False
    size = max(min(0.7 * _DOTS / statistics.shape.layers, _LARGEST_DOT), 1.0)
    rows = np.arange(statistics.shape.layers)
    axes.hlines(rows, 0, np.nan_to_num(rates[Phase.DECODE]), color=PALE, linewidth=size / 2, zorder=1)
    if np.isfinite(rates[Phase.PREFILL]).any():
        axes.plot(rates[Phase.PREFILL], rows, "D", markersize=0.9 * size, color=PREFILL, markerfacecolor="white",
                  markeredgewidth=0.9, clip_on=False, label=_overall(statistics, Phase.PREFILL))  # fmt: skip
    if np.isfinite(rates[Phase.DECODE]).any():
        axes.plot(rates[Phase.DECODE], rows, "o", markersize=size, color=DECODE, clip_on=False,
                  label=_overall(statistics, Phase.DECODE))  # fmt: skip
    axes.set(xlim=(0, 100), xlabel="hit rate (%)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, UNDER), reverse=True,
                handletextpad=0.3)  # fmt: skip
    return True


def draw_concentration(axes: Axes, statistics: Statistics) -> None:
    """Draw the share of uses that the hottest experts take: the mean of the layers, and all of them as a band."""
    share = shares(statistics)
    used = share[np.isfinite(share).all(axis=1)]
    axes.set_title("Use taken by the hottest experts")
    if not len(used):
        write_note(axes, "no expert was used yet")
        return
    covered = 100 * np.cumsum(np.sort(used, axis=1)[:, ::-1], axis=1)
    covered = np.hstack([np.zeros((len(covered), 1)), covered])
    x, mean = np.linspace(0, 100, covered.shape[1]), covered.mean(axis=0)
    axes.plot([0, 100], [0, 100], color=GREY, linewidth=0.8, linestyle=":", label="if all were used alike")
    if len(used) > 1:
        axes.fill_between(x, covered.min(axis=0), covered.max(axis=0), color=DECODE, alpha=0.22, linewidth=0,
                          label="least to most of the layers")  # fmt: skip
    axes.plot(x, mean, color=DECODE, linewidth=1.8, label="mean of the layers")
    axes.set_title(f"Hottest {percent(_TOLD, 0)} take {np.interp(100 * _TOLD, x, mean):.0f} % of uses")
    axes.set(xlim=(0, 100), ylim=(0, 100), xlabel="hottest experts of a layer (%)", ylabel="uses covered (%)")
    axes.grid()
    axes.legend(loc="lower right", reverse=True)


def _overall(statistics: Statistics, phase: Phase) -> str:
    hits, misses = int(statistics.hits[phase].sum()), int(statistics.misses[phase].sum())
    return f"{phase.name.lower()} (all layers: {percent(hits / (hits + misses))})"
