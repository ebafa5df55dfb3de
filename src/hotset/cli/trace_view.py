"""The summary of a trace as tables for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from hotset.cli.output import facts_table
from hotset.shape import format_size
from hotset.text import printable

_MAX_SHOWN = 6


def info_views(document: dict[str, Any]) -> Iterator[RenderableType]:
    """The tables of one trace: the model, the workload, and how skewed and repetitive its routing is."""
    yield Text(printable(document["file"]), style="bold")
    labels = [(f"label {key}", _values(entry)) for key, entry in document["labels"].items()]
    for rows in (_model_rows(document), _workload_rows(document), _routing_rows(document), labels):
        if rows:
            yield facts_table(rows)
            yield Text("")


def _model_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    shape = document["shape"]
    guessed = " (inferred from the ids)" if "experts_guessed" in document["meta"] else ""
    return [
        ("model", document["model"] or "not stated"),
        ("source", document["source"] or "not stated"),
        ("MoE layers", f"{shape['layers']:,}"),
        ("experts per layer", f"{shape['experts']:,}{guessed}"),
        ("experts per token", f"{shape['top_k']} per layer, {shape['token_cycle']:,} in all"),
        ("all experts", f"{shape['total_experts']:,}, {_size(shape['total_expert_bytes'])}"),
        ("one expert", _size(shape["expert_bytes"])),
    ]


def _workload_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    parts = {
        "router weights": document["has_weights"],
        "token ids": document["has_token_ids"],
        f"predictions up to {document['prediction_distances']} layers ahead": document["prediction_distances"],
    }
    return [
        ("requests", f"{document['requests']:,}"),
        ("tokens", f"{document['tokens']:,}"),
        ("prefill, decode", f"{document['prefill_tokens']:,}, {document['decode_tokens']:,}"),
        ("steps", f"{document['steps']:,}"),
        ("events", f"{document['events']:,}, the largest of {document['largest_event']} experts"),
        ("experts asked for", f"{document['accesses']:,}"),
        ("also recorded", ", ".join(name for name, there in parts.items() if there) or "nothing"),
    ]


def _routing_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    distinct, entropy = document["distinct_experts_per_event"], document["entropy"]
    rows = [(f"experts per {phase} event", f"{mean:.1f}") for phase, mean in distinct.items() if mean is not None]
    if entropy["mean"] is not None:
        spread = f"{entropy['mean']:.3f} on average, {entropy['min']:.3f} to {entropy['max']:.3f}"
        rows.append(("entropy of use (1 = even)", spread))
    rows += [(f"top {name} take", f"{_percent(share)} of accesses") for name, share in document["top_share"].items()]
    rates = (f"{_percent(rate)} at {lag}" for lag, rate in document["repeat_rate"].items() if rate is not None)
    rows.append(("used again after N tokens", ", ".join(rates) or "no request is long enough"))
    rows.append(("used again by chance", _percent(document["repeat_rate_by_chance"])))
    return rows


def _values(entry: dict[str, Any]) -> str:
    counts = entry.get("requests")
    if counts is None:
        return f"{entry['distinct']:,} values"
    shown = [f"{value} ({count})" for value, count in list(counts.items())[:_MAX_SHOWN]]
    rest = len(counts) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _size(size_bytes: int | None) -> str:
    return "size not stated" if size_bytes is None else format_size(size_bytes)
