"""Profiles as figures, and as tables for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hotset.cli.output import facts_table
from hotset.profile import Profile
from hotset.report.usage import concentration, totals
from hotset.report.words import percent, plural
from hotset.shape import format_size
from hotset.text import printable
from hotset.trace import Phase
from hotset.trace.summary import entropy, spread


def summary(profile: Profile) -> dict[str, Any]:
    """A profile in a few words: of which model it is, how much it saw, and when."""
    shape, mark = profile.shape, profile.fingerprint
    return {
        "architecture": mark.architecture,
        "digest": mark.digest,
        "shape": {
            "layers": shape.layers,
            "experts": shape.experts,
            "top_k": shape.top_k,
            "expert_bytes": shape.expert_bytes,
        },
        "tokens": {phase.name.lower(): int(profile.tokens[phase]) for phase in Phase},
        "created": profile.created,
        "updated": profile.updated,
        "policy": profile.policy or None,
    }


def figures(profile: Profile) -> dict[str, Any]:
    """All that a profile says in numbers."""
    statistics = profile.statistics()
    return summary(profile) | {
        "concentration": concentration(statistics),
        "entropy": spread(entropy(statistics.uses.sum(axis=0))),
        "learnt": sorted(profile.learnt),
        "hit_rate": totals(statistics)["hit_rate"],
        "resident": None if profile.residency is None else int(statistics.resident.sum()),
        "pinned": None if profile.residency is None else int(statistics.pinned.sum()),
        "history": {
            "spans": len(profile.history.spans),
            "tokens": int(profile.history.spans[:, 0].sum()),
            "marks": [{"tokens": mark.tokens, "label": mark.label} for mark in profile.history.marks],
        },
        "meta": profile.meta,
    }


def written(document: dict[str, Any]) -> str:
    """One line that says what was written."""
    return f"{document['file']}: {_tokens(document)} of {_model(document)}"


def list_views(document: dict[str, Any]) -> Iterator[RenderableType]:
    """The table of named profiles, and what is wrong with those that are damaged."""
    entries = document["profiles"]
    if not entries:
        yield Text(f"no profiles yet in {printable(document['folder'])}: hotset profile make TRACE -o NAME makes one")
        return
    table = _table(f"profiles in {document['folder']}")
    for name in ("name", "model", "shape", "prefill\ntokens", "decode\ntokens", "updated", "size"):
        right = "tokens" in name or name == "size"
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for entry in entries:
        table.add_row(*map(_cell, _list_row(entry)))
    yield table
    for entry in entries:
        if entry["damaged"] is not None:
            yield _cell(f"{entry['name']} is damaged: {entry['damaged']}")


def show_views(document: dict[str, Any]) -> Iterator[RenderableType]:
    """What a profile is of, what it saw, and how its use of experts is spread."""
    yield Text(printable(document["file"]), style="bold")
    yield facts_table((*_origin_rows(document), *_use_rows(document), *_extra_rows(document)))


def diff_views(document: dict[str, Any]) -> Iterator[RenderableType]:
    """How alike two profiles are, and what changed most."""
    names = f"from {document['before']} to {document['after']}"
    yield Text(printable(names), style="bold")
    yield facts_table(_alike_rows(document))
    if document["changed"]:
        yield _changed_table(document)


def _list_row(entry: dict[str, Any]) -> tuple[str, ...]:
    if entry["damaged"] is not None:
        return (entry["name"], "damaged", "", "", "", "", "")
    shape, tokens = entry["shape"], entry["tokens"]
    grid = f"{shape['layers']} x {shape['experts']}, top {shape['top_k']}"
    counts = (f"{tokens['prefill']:,}", f"{tokens['decode']:,}")
    model, moment = entry["architecture"].removesuffix("ForCausalLM"), entry["updated"][:16].replace("T", " ")
    return (entry["name"], model, grid, *counts, moment, format_size(entry["bytes"]))


def _origin_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("model", _model(document)),
        ("digest of its weights", document["digest"] or "not known: needs --allow-foreign"),
        ("tokens", _tokens(document)),
        ("created, updated", f"{document['created']}, {document['updated']}"),
        ("size", format_size(document["bytes"])),
    ]


def _use_rows(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for share, part in document["concentration"].items():
        if part is not None:
            yield f"hottest {share.replace('.0%', '%').replace('%', ' %')} take", f"{percent(part)} of uses"
    even = document["entropy"]
    if even["mean"] is not None:
        yield "entropy of use (1 = even)", f"{even['mean']:.3f} on average, {even['min']:.3f} to {even['max']:.3f}"
    else:
        yield "uses", "none were counted"


def _extra_rows(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    learnt, history = document["learnt"], document["history"]
    what = plural(len(learnt), "table") + f" of {document['policy'] or 'a policy'}"
    yield "what a policy learnt", what if learnt else "nothing: a start from it uses the counts"
    rate = document["hit_rate"]
    yield "hit rate", "not known: made without a cache" if rate is None else percent(rate)
    if document["resident"] is not None:
        yield "resident when saved", f"{plural(document['resident'], 'expert')}, {document['pinned']:,} pinned"
    marks = plural(len(history["marks"]), "mark")
    yield "history", f"{plural(history['spans'], 'span')}, {plural(history['tokens'], 'decode token')}, {marks}"
    for name, value in document["meta"].items():
        yield f"{name:.60}", value


def _alike_rows(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    alike = document["cosine"]
    if alike["mean"] is None:
        yield "alike", "nothing to compare: neither has counted a use"
        return
    least = ", ".join(str(layer) for layer in alike["least_alike_layers"])
    yield "cosine (1 = alike)", f"{alike['mean']:.3f} on average, {alike['min']:.3f} at least"
    yield "least alike layers", least
    for share, part in document["shared_hot_set"].items():
        name = share.replace(".0%", "%").replace("%", " %")
        yield f"hottest {name} in common", percent(part)


def _changed_table(document: dict[str, Any]) -> Table:
    table = _table("changed most (uses per token)")
    for name in ("layer", "expert", "before", "after", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("direction", overflow="fold")
    for row in document["changed"]:
        numbers = (f"{row['before']:.3f}", f"{row['after']:.3f}", f"{row['change']:+.3f}")
        table.add_row(
            str(row["layer"]), str(row["expert"]), *numbers, _cell(f"{row['direction']} in {document['after']}")
        )
    return table


def _model(document: dict[str, Any]) -> str:
    shape = document["shape"]
    grid = f"{shape['layers']} layers x {shape['experts']} experts, top {shape['top_k']}"
    return f"{document['architecture']}, {grid}"


def _tokens(document: dict[str, Any]) -> str:
    tokens = document["tokens"]
    return f"{tokens['prefill']:,} prefill and {tokens['decode']:,} decode tokens"


def _cell(text: str) -> Text:
    return Text(printable(text))


def _table(title: str) -> Table:
    return Table(
        title=Text(printable(title), style="bold"), title_justify="left", box=box.SIMPLE_HEAD,
        padding=(0, 1), collapse_padding=True, pad_edge=False, show_edge=False,
    )  # fmt: skip
