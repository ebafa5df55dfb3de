"""`hotset models`: what is on this machine, how large, in which precision, and whether it fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotset.cli.output import JsonFlag, emit
from hotset.shape import format_size

if TYPE_CHECKING:
    from rich.table import Table

    from hotset.generation.known_models import KnownModel

FREE_SHARE = 0.8
"""Of the memory that is available: the rest is for contexts, activations and libraries. `doctor` is exact."""


def models(as_json: JsonFlag = False) -> None:
    """List the models on this machine: the one that ships with hotset, those used or packed here, and the hub's cache.

    Each can be given to run, chat and doctor by its name.

    Example: hotset models
    """
    from hotset.engine.memory import available_memory_bytes
    from hotset.generation.known_models import all_models

    free, found = available_memory_bytes(), all_models()
    rows = [_row(model, free) for model in found]
    document = {"models": rows, "available_bytes": free}
    more = f"{format_size(free)} of memory are available; hotset doctor NAME says more of one."
    emit(document, as_json, *(() if as_json else (_table(rows), more)))


def _row(model: KnownModel, free_bytes: int) -> dict[str, Any]:
    return {
        "name": model.name,
        "kind": model.kind,
        "size_bytes": model.size_bytes,
        "precision": model.precision,
        "mixture_of_experts": model.mixture_of_experts,
        "fits": model.size_bytes <= FREE_SHARE * free_bytes,
        "place": model.place,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from hotset.text import printable

    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("model", "where", "precision", "size", "fits in memory"):
        table.add_column(name, justify="right" if name == "size" else "left", no_wrap=name != "where")
    for row in rows:
        fits = "yes, as a whole" if row["fits"] else "no: a share of its experts does, by --memory"
        if row["mixture_of_experts"] is False:
            fits = "has no experts: hotset is not for it"
        words = (row["name"], row["kind"], row["precision"], format_size(row["size_bytes"]), fits)
        table.add_row(*(Text(printable(word)) for word in words))
    return table
