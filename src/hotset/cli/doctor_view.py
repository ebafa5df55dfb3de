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
    measured = list(_calibration(report["calibration"])) if "calibration" in report else []
    parts = (("This machine", machine), ("The model", model), ("hotset will use", chosen), ("Measured", measured))
    for title, rows in parts:
        if rows:
            yield facts_table(rows, title, name_width=18)
            yield Text("")


def _unknown(found: Any) -> str | None:
    return f"unknown: {found['unknown']}" if isinstance(found, dict) and "unknown" in found else None


def _software(found: Any) -> Iterator[Line]:
    if isinstance(found, dict):
        yield "software", str(_unknown(found))
        return
    for row in found:
        version, wanted = row["version"], f"hotset wants {row['wanted']}"
        if version is None:
            yield row["name"], f"not installed ({wanted})" if row["wanted"] else "not installed"
        elif row["supported"] is False:
            yield row["name"], f"{version}: not supported, {wanted}"
        else:
            yield row["name"], f"{version}{' (supported)' if row['supported'] else ''}"


def _machine(report: dict[str, Any]) -> Iterator[Line]:
    processor, memory, gpus, limits = (report[key] for key in ("processor", "memory", "gpus", "limits"))
    yield "CPU", _unknown(processor) or _processor(processor)
    yield "memory", _unknown(memory) or _memory(memory)
    if not gpus or isinstance(gpus, dict):
        yield "GPUs", _unknown(gpus) or "none that torch can use"
    for number, gpu in enumerate(gpus if isinstance(gpus, list) else []):
        free, total = format_size(gpu["free_bytes"]), format_size(gpu["total_bytes"])
        yield f"GPU {number}", f"{gpu['name']}, {free} of {total} free, driver {gpu['driver'] or 'unknown'}"
    lockable = limits.get("memlock_bytes")
    most = "as much as there is" if lockable is None else f"{format_size(lockable)} (ulimit -l)"
    yield "lockable memory", _unknown(limits) or most


def _processor(found: dict[str, Any]) -> str:
    cores, usable = found["cores"], found["usable_cores"]
    allowed = "" if cores == usable else f", {usable} for this process"
    return f"{found['name']}, {cores} cores{allowed}, {' '.join(found['flags']) or 'no vector instructions known'}"


def _memory(found: dict[str, Any]) -> str:
    limit = found["group_limit_bytes"]
    group = f", limited to {format_size(limit)} by a control group" if limit else ""
    return f"{format_size(found['available_bytes'])} available of {format_size(found['total_bytes'])}{group}"


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


def _speed(found: dict[str, float] | None) -> str:
    if found is None:
        return "hotset doctor MODEL --measure measures this machine, once, and tells"
    return f"{found['low']:.3g} to {found['high']:.3g} tokens per second with --memory auto, by what was measured here"


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
    if "tokens_per_s" in found:
        yield "speed to expect", _speed(found["tokens_per_s"])
    if found["pack"]:
        yield from _pack(found["pack"])
    else:
        yield "experts stored as", _format(found["experts_format"])
    yield "fits as a whole", "yes: hotset is not needed to run it here" if found["fits"] else "no"


def _format(found: dict[str, Any]) -> str:
    """In a word for plain numbers, with its options for a weight format."""
    stored, kept = found["stored"], ", ".join(found["in_memory"])
    more = f"; {found['expanded']}: expanded to plain numbers whenever read" if found["expanded"] else ""
    return stored if stored == kept else f"{stored}, in memory {kept}{more}"


def _pack(found: dict[str, Any]) -> Iterator[Line]:
    from hotset.analysis.planner.model import MORE_SPECS, SPECS

    names = {spec: name for name, spec in (SPECS | MORE_SPECS).items()}
    yield "packed as", ", ".join(names.get(spec, spec) for spec in found["formats"])
    if found["calibration"]:
        yield "calibrated on", found["calibration"]
    if found["quality"]:
        yield "quality", quality_line(found["quality"])
        for name, part in found["quality"].get("parts", {}).items():
            top, loss = f"same token {100 * part['same_top']:.1f} %", f"perplexity {part['packed_perplexity']:.2f}"
            yield f"  {name}", f"KL {part['kl_mean']:.2g}, {top}, {loss} (original {part['perplexity']:.2f})"


def _calibration(found: dict[str, Any]) -> Iterator[Line]:
    cpu, gpu = found["cpu"], found["gpu"]
    yield "memory reads", f"{cpu['memory_bytes_per_s'] / 1e9:.1f} GB/s"
    yield "missing experts", f"{cpu['disk_bytes_per_s'] / 1e9:.2f} GB/s from disk, after {1e6 * cpu['read_s']:.0f} us"
    share = f"{100 * cpu['kept']:.0f} % of the compute and {100 * cpu['busy']:.0f} % of the reading"
    yield "both at once", f"{share} are left"
    fixed = [f"{1e6 * cpu[key]:.0f} us {words}" for key, words in _FIXED.items()]
    yield "beside weights", ", ".join(fixed)
    for shape in dict.fromkeys(str(point["matrices"]) for point in found["experts"]):
        own = [point for point in found["experts"] if str(point["matrices"]) == shape]
        (outputs, inputs), *_ = own[0]["matrices"]
        times = ", ".join(f"{point['precision']} {1e6 * point['one_s']:.0f} us" for point in own)
        yield f"expert {outputs // 2} x {inputs}", times
    if gpu:
        yield gpu["name"], f"{gpu['memory_bytes_per_s'] / 1e9:.0f} GB/s, link {gpu['link_bytes_per_s'] / 1e9:.1f} GB/s"
    yield "kept in", found["file"]


_FIXED = {"layer_s": "a layer", "event_s": "an event", "partial_s": "more where not all fits", "miss_s": "a miss"}
