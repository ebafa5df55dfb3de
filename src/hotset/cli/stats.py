"""`hotset stats`: which experts a profile saw in use, how often they were hit, and how concentrated that is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.cli.output import JsonFlag, emit
from hotset.cli.targets import check_figure
from hotset.errors import ProfileError

if TYPE_CHECKING:
    from hotset.profile.statistics import Statistics


def stats(
    name: Annotated[str, typer.Argument(metavar="PROFILE", help="A profile: its name, or a path.", show_default=False)],
    layer: Annotated[
        int | None, typer.Option(metavar="L", help="Show this layer alone, with all that is known of its experts.")
    ] = None,
    top: Annotated[int | None, typer.Option(min=1, help="How many of the hottest experts of a layer to show.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it, too: .png, .svg or .pdf.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show which experts were used, layer by layer.

    Example: hotset stats chat --layer 3 --top 20 --plot chat.png
    """
    from hotset.profile import Profile
    from hotset.profile.folder import locate

    check_figure(plot)
    statistics = Profile.load(locate(name)).statistics()
    _check_layer(layer, statistics)
    if plot:
        from hotset.report.heat import plot_statistics

        plot_statistics(statistics, plot, title=name)
    document = _document(name, statistics, layer, top) if as_json else {}
    emit(document, as_json, *([] if as_json else _views(statistics, layer, top)))


def _check_layer(layer: int | None, statistics: Statistics) -> None:
    last = statistics.shape.layers - 1
    if layer is not None and not 0 <= layer <= last:
        raise ProfileError(f"there is no layer {layer}: the profile has layers 0 to {last}")


def _document(name: str, statistics: Statistics, layer: int | None, top: int | None) -> dict[str, Any]:
    from hotset.report.usage import concentration, layer_figures, totals
    from hotset.trace.summary import entropy, spread

    layers = range(statistics.shape.layers) if layer is None else [layer]
    return {
        "profile": name,
        "layers": layer_figures(statistics, layers, top or 10),
        "concentration": concentration(statistics),
        "entropy": spread(entropy(statistics.uses.sum(axis=0))),
        **totals(statistics),
    }


def _views(statistics: Statistics, layer: int | None, top: int | None) -> Iterator[Any]:
    from hotset.report.usage import expert_table, layer_table, phase_table

    yield phase_table(statistics)
    yield ""
    yield layer_table(statistics, top or 3) if layer is None else expert_table(statistics, layer, top or 10)
