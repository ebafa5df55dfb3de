"""Draws the evidence about the reference model, in the style of hotset's own plots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from hotset.report.plot_style import GREY, INK, PALE, SETTINGS, looks

BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
_ROWS, _COLUMNS = 3, 5
_DPI = 150


def draw(result: dict[str, Any], use: dict[str, Any], folder: Path) -> None:
    """Write all plots into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    plots: dict[str, Callable[[], Any]] = {
        "loss": lambda: _loss(result["loss"]),
        "use": lambda: _use(use),
        "cosine": lambda: _cosine(result["cosine"]),
        "entropy": lambda: _entropy(result["entropy"]),
        "repeat": lambda: _repeat(result["repeat_rate"]),
        "look_ahead": lambda: _look_ahead(result["look_ahead"], result["repeat_rate"]["chance"]),
        "hit_rates": lambda: _hit_rates(result["hit_rates"]),
        "profiles": lambda: _profiles(result["profiles"]["by_domain"], result["criteria"]["own_profile"]),
    }
    for name, plot in plots.items():
        with mpl.rc_context():
            mpl.rcdefaults()
            mpl.rcParams.update(SETTINGS)
            figure = plot()
            figure.savefig(folder / f"{name}.png", dpi=_DPI, metadata={"Software": "hotset"})
            plt.close(figure)


def _loss(loss: dict[str, dict[str, float]]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.9), sharey=True, layout="constrained")
    names = list(loss)
    for ax, key, title in zip(
        axes, ("nats_per_token", "bits_per_byte"), ("nats per token", "bits per byte"), strict=True
    ):
        values = [loss[name][key] for name in names]
        bars = ax.barh(names, values, color=BLUE, height=0.68)
        ax.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        ax.set_title(title)
        ax.set_xlim(0, 1.12 * max(values))
        ax.margins(y=0.015)
        ax.tick_params(length=0)
        ax.spines["left"].set_visible(False)
    axes[0].invert_yaxis()
    figure.supxlabel("loss on text that was held out; lower is better", fontsize=8, color=GREY)
    return figure


def _use(panels: dict[str, Any]) -> Any:
    figure, grid = plt.subplots(_ROWS, _COLUMNS, figsize=(11, 5), sharex=True, sharey=True, layout="constrained")
    top = 100 * float(np.quantile(np.stack(list(panels.values())), 0.995))
    image = None
    for ax, (name, shares) in zip(grid.flat, panels.items(), strict=True):
        image = ax.imshow(100 * shares, aspect="auto", cmap="viridis", vmin=0, vmax=top, interpolation="nearest")
        ax.set_title(name)
        ax.set_yticks([0, 7], ["0", "7"])
        ax.set_xticks([0, 31, 63], ["1", "32", "64"])
        ax.spines[:].set_visible(False)
        ax.tick_params(length=2)
    for ax in grid[:, 0]:
        ax.set_ylabel("layer")
    for ax in grid[-1]:
        ax.set_xlabel("expert, in order of domain")
    bar = figure.colorbar(image, ax=grid, shrink=0.6, aspect=30, pad=0.01, extend="max")
    bar.set_label("share of the layer's accesses (%); even use is 1.6")
    bar.outline.set_visible(False)
    return figure


def _matrix(ax: Any, values: Any, rows: list[str], columns: list[str], low: float, high: float) -> Any:
    """A heat map with its numbers written in."""
    image = ax.imshow(values, aspect="auto", cmap="cividis", vmin=low, vmax=high)
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xticks(range(len(columns)), columns)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    for (i, j), value in np.ndenumerate(values):
        color = "white" if value < low + 0.55 * (high - low) else INK
        text = f"{value:.2f}".removeprefix("0") if value < 0.995 else "1.0"
        ax.text(j, i, text, ha="center", va="center", fontsize=7.5, color=color)
    return image


def _cosine(cosine: dict[str, Any]) -> Any:
    figure, ax = plt.subplots(figsize=(7.2, 6), layout="constrained")
    names, values = list(cosine["by_domain"]), np.array(cosine["matrix"])
    image = _matrix(ax, values, names, names, float(values.min()), float(values.max()))
    ax.tick_params(axis="x", rotation=45)
    for label in ax.get_xticklabels():
        label.set(ha="right", rotation_mode="anchor")
    for i in range(len(names)):
        ax.add_patch(plt.Rectangle((i - 0.5, i - 0.5), 1, 1, fill=False, edgecolor=ORANGE, linewidth=1.4))
    bar = figure.colorbar(image, ax=ax, shrink=0.7, aspect=30, pad=0.02)
    bar.set_label("mean cosine between two requests")
    bar.outline.set_visible(False)
    return figure


def _entropy(entropy: dict[str, list[float]]) -> Any:
    figure, ax = plt.subplots(figsize=(6.4, 4.6), layout="constrained")
    names = list(entropy)
    values = np.array([entropy[name] for name in names])
    _matrix(ax, values, names, [str(i) for i in range(values.shape[1])], float(values.min()), 1.0)
    ax.axhline(len(names) - 1.5, color="white", linewidth=2.5)
    ax.set_xlabel("layer")
    return figure


def _small_multiples(names: list[str]) -> tuple[Any, Any]:
    figure, grid = plt.subplots(_ROWS, _COLUMNS, figsize=(11, 6), sharex=True, sharey=True, layout="constrained")
    for ax, name in zip(grid.flat, names, strict=False):
        ax.set_title(name)
        ax.grid(axis="y", color=PALE, linewidth=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(length=2.5)
    return figure, grid


def _repeat(repeat: dict[str, Any]) -> Any:
    names, lags = list(repeat["by_domain"]), repeat["lags"]
    figure, grid = _small_multiples(names)
    for ax, name in zip(grid.flat, names, strict=False):
        own = repeat["by_domain"][name]
        ax.axhline(100 * repeat["chance"], color=GREY, linewidth=0.9, linestyle=":", label="chance, 8 of 64")
        ax.axhline(
            100 * own["unrelated"],
            color=ORANGE,
            linewidth=1.1,
            linestyle="--",
            label="two requests of the domain",
        )
        ax.plot(lags, 100 * np.array(own["by_lag"]), color=BLUE, marker="o", markersize=4, label="within the request")
        ax.set_xscale("log", base=2)
        ax.set_xticks(lags, [str(lag) for lag in lags])
        ax.minorticks_off()
        ax.set_ylim(0, 45)
    _legend_in_last(grid)
    figure.supxlabel("distance of the two tokens", fontsize=8.5)
    figure.supylabel("experts in common (%)", fontsize=8.5)
    return figure


def _legend_in_last(grid: Any) -> None:
    """The place of the missing panel."""
    last = grid.flat[-1]
    last.axis("off")
    grid.flat[-1 - grid.shape[1]].tick_params(labelbottom=True)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    last.legend(handles[::-1], labels[::-1], loc="center", frameon=False, fontsize=8, handlelength=2.2)


def _look_ahead(found: dict[str, Any], chance: float) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.5), sharey=True, layout="constrained")
    for ax, phase in zip(axes, ("decode", "prefill"), strict=True):
        own = found[phase]
        lines = zip(own["by_distance_and_layer"], (BLUE, ORANGE, GREEN), "os^", strict=True)
        for distance, (row, color, marker) in enumerate(lines, start=1):
            ax.plot(
                range(len(row)), [np.nan if x is None else 100 * x for x in row], color=color, marker=marker,
                markersize=4.5, label=f"{distance} layer{'s' * (distance > 1)} ahead",
            )  # fmt: skip
        ax.axhline(
            100 * found["most_used"][phase], color=INK, linewidth=0.9, linestyle="--", label="the domain's\nmost used 8"
        )
        ax.axhline(100 * chance, color=GREY, linewidth=0.9, linestyle=":", label="chance")
        ax.set_title(phase)
        ax.set_ylim(0, 100)
        ax.set_xlim(0.7, 7.3)
        ax.set_xlabel("layer predicted")
        ax.set_xticks(range(1, len(own["by_distance_and_layer"][0])))
        ax.grid(axis="y", color=PALE, linewidth=0.6)
        ax.set_axisbelow(True)
    axes[0].set_ylabel("true experts among the 8 predicted (%)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    return figure


def _hit_rates(found: dict[str, Any]) -> Any:
    panels = found["by_domain"] | {"mean of all": found["mean"]}
    figure, grid = _small_multiples(list(panels))
    budgets = found["budgets_percent"]
    style = looks(found["mean"])
    for ax, own in zip(grid.flat, panels.values(), strict=True):
        for policy, rates in own.items():
            look = style[policy]
            ax.plot(
                budgets, 100 * np.array(rates), color=look.color, marker=look.marker, markersize=3.8, linewidth=1.2,
                markeredgecolor="white", markeredgewidth=0.4, label="belady (bound)" if policy == "belady" else policy,
            )  # fmt: skip
        ax.set_xticks(budgets, [f"{b:g}" for b in budgets])
        ax.set_ylim(20, 100)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=8)
    figure.supxlabel("experts resident (%)", fontsize=8.5)
    figure.supylabel("decode hit rate (%)", fontsize=8.5)
    return figure


def _profiles(found: dict[str, Any], wanted: dict[str, Any]) -> Any:
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8.4, 4), sharey=True, layout="constrained", width_ratios=(1.5, 1)
    )
    names = list(found)
    own, other = (100 * np.array([found[name][key] for name in names]) for key in ("own", "other"))
    points = np.array([found[name]["points"] for name in names])
    rows = np.arange(len(names))
    left.hlines(rows, other, own, color=PALE, linewidth=3, zorder=1)
    left.plot(other, rows, "s", color=ORANGE, markersize=5.5, label="profile of the other 13 domains")
    left.plot(own, rows, "o", color=BLUE, markersize=6, label="profile of the domain's other requests")
    left.axvline(25, color=GREY, linewidth=0.9, linestyle=":", label="random 16 of 64")
    left.set_yticks(rows, names)
    left.invert_yaxis()
    left.set_xlim(0, 100)
    left.set_xlabel("decode hit rate (%)")
    left.set_title("a fixed 16 of 64 experts per layer")
    right.barh(rows, points, height=0.62, color=[BLUE if p >= wanted["wanted_points"] else "#9cc3dc" for p in points])
    for row, value in zip(rows, points, strict=True):
        right.text(value + 0.6, row, f"{value:.1f}", va="center", fontsize=8)
    right.axvline(wanted["wanted_points"], color=GREY, linewidth=0.9, linestyle="--")
    right.set_xlim(0, 1.14 * points.max())
    right.set_title("difference")
    right.set_xlabel("points; the line is the threshold")
    for ax in (left, right):
        ax.tick_params(length=0)
        ax.spines["left"].set_visible(False)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure
