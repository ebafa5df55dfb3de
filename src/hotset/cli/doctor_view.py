"""The findings of the doctor as a table for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from hotset.cli.output import facts_table
from hotset.cli.quality_view import quality_line
from hotset.shape import format_size

Line = tuple[str, str]


def report_views(report: dict[str, Any]) -> Iterator[Table | Text]:
    """The machine, the model if one was named, and what hotset will use."""
    chosen = ((row["what"], f"{row['value']}: {row['why']}") for row in report["choices"])
    machine = [*_software(report["software"]), *_machine(report), *_disk(report["disk"])]
    model = list(_model(report["model"])) if report["model"] else []
    for title, rows in (("This machine", machine), ("The model", model), ("hotset will use", chosen)):
        if rows:
            yield facts_table(rows, title, name_width=18)
            yield Text("")


def _unknown(found: Any) -> str | None:
    return f"unknown: {found['unknown']}" if isinstance(found, dict) and "unknown" in found else None


def _software(found: Any) -> list[Line]:
    if isinstance(found, dict):
        return [("software", str(_unknown(found)))]
    return [(row["name"], _version(row)) for row in found]


def _version(row: dict[str, Any]) -> str:
    if row["version"] is None:
        return f"not installed (hotset wants {row['wanted']})" if row["wanted"] else "not installed"
    if row["supported"] is False:
        return f"{row['version']}: not supported, hotset wants {row['wanted']}"
    return f"{row['version']}{' (supported)' if row['supported'] else ''}"


def _machine(report: dict[str, Any]) -> Iterator[Line]:
    processor, memory, gpus, limits = (report[key] for key in ("processor", "memory", "gpus", "limits"))
    yield "CPU", _unknown(processor) or _processor(processor)
    yield "memory", _unknown(memory) or _memory(memory)
    if isinstance(gpus, dict):
        yield "GPUs", str(_unknown(gpus))
    elif not gpus:
        yield "GPUs", "none that torch can use"
    for number, gpu in enumerate(gpus if isinstance(gpus, list) else []):
        free, total = format_size(gpu["free_bytes"]), format_size(gpu["total_bytes"])
        yield f"GPU {number}", f"{gpu['name']}, {free} of {total} free, driver {gpu['driver'] or 'unknown'}"
    yield "lockable memory", _unknown(limits) or _lockable(limits["memlock_bytes"])


def _processor(found: dict[str, Any]) -> str:
    cores, usable = found["cores"], found["usable_cores"]
    allowed = "" if cores == usable else f", {usable} for this process"
    return f"{found['name']}, {cores} cores{allowed}, {' '.join(found['flags']) or 'no vector instructions known'}"


def _memory(found: dict[str, Any]) -> str:
    limit = found["group_limit_bytes"]
    group = f", limited to {format_size(limit)} by a control group" if limit else ""
    return f"{format_size(found['available_bytes'])} available of {format_size(found['total_bytes'])}{group}"


def _lockable(size: int | None) -> str:
    return "as much as there is" if size is None else f"{format_size(size)} (ulimit -l)"


def _disk(found: dict[str, Any]) -> Iterator[Line]:
    if "free_bytes" in found:
        yield "disk", f"{format_size(found['free_bytes'])} free under {found['path']}"
        ahead = found["read_ahead_kb"]
        yield "read ahead", "unknown: the system does not say for this device" if ahead is None else f"{ahead} KiB"
    if unknown := _unknown(found):
        yield "disk speed", unknown
    for size in sorted({read["read_bytes"] for read in found.get("reads", [])}):
        own = [read for read in found["reads"] if read["read_bytes"] == size]
        rates = (f"{format_size(r['bytes_per_s'])}/s with {r['threads']}" for r in own)
        yield f"reads of {format_size(size)}", f"{', '.join(rates)} threads, on {found['measured_on']}"


def _model(found: dict[str, Any]) -> Iterator[Line]:
    yield "name", found["model"]
    if "unknown" in found:
        yield "cannot be run", found["unknown"]
        return
    experts = f"{found['layers']} layers x {found['experts']} experts, {found['top_k']} per token and layer"
    yield "experts", f"{experts}, {format_size(found['expert_bytes'])} each"
    yield "all experts", format_size(found["all_experts_bytes"])
    yield "the rest", f"{format_size(found['dense_bytes'])}, always in memory"
    yield "25 % of the experts", format_size(found["quarter_bytes"])
    yield "one token's experts", format_size(found["cycle_bytes"])
    yield "smallest budget", f"{format_size(found['least_bytes'])} ({found['least_slots']} slots)"
    if found["pack"]:
        yield from _pack(found["pack"])
    yield "fits as a whole", "yes: hotset is not needed to run it here" if found["fits"] else "no"


def _pack(found: dict[str, Any]) -> Iterator[Line]:
    yield "packed as", ", ".join(found["formats"])
    if found["calibration"]:
        yield "calibrated on", found["calibration"]
    if found["quality"]:
        yield "quality", quality_line(found["quality"])
        for name, part in found["quality"].get("parts", {}).items():
            top, loss = f"same token {100 * part['same_top']:.1f} %", f"perplexity {part['packed_perplexity']:.2f}"
            yield f"  {name}", f"KL {part['kl_mean']:.2g}, {top}, {loss} (original {part['perplexity']:.2f})"
