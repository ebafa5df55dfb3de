"""How a plot looks: fonts, and a colour and a marker for each policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from hotset.report.words import BOUND

INK, GREY, PALE = "#222222", "#6b6b6b", "#dddddd"

SETTINGS: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica", "sans-serif"],
    "font.size": 8.5,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": PALE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "text.color": INK,
    "text.parse_math": False,  # a dollar sign in a file name is a dollar sign
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "savefig.dpi": 200,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "hotset",  # the same rows give the same bytes
    "pdf.fonttype": 42,
}

# Okabe and Ito's colours, which people with any colour vision tell apart; their yellow is darkened to show on white.
_LOOKS = {
    "nextuse": ("#000000", "*"),
    "blend": ("#D55E00", "o"),
    "lru": ("#0072B2", "s"),
    "lfru": ("#009E73", "^"),
    "decay": ("#CC79A7", "D"),
    "lfu": ("#56B4E9", "v"),
    "window": ("#E69F00", "P"),
    "slru": ("#A89A00", "X"),
    "layered": ("#8C8C8C", "<"),
    "static": ("#7B4B2A", ">"),
    "class_lru": ("#5A4FCF", "h"),
}
_ALIKE = {"best": "blend", "gate": "lru", "token": "lfru", "transition": "decay", "previous": "lfu", "eam": "window"}
"""Forecasts look like policies, which are never in the same panel."""


class Look(NamedTuple):
    """The colour, marker and dash of one line."""

    color: str
    marker: str
    dash: str = "-"


def looks(policies: Iterable[str]) -> dict[str, Look]:
    """A look per policy or forecast: its own in every figure, or a free one for a variant of one already there."""
    found: dict[str, Look] = {BOUND: Look("#000000", "o")}
    names = [policy for policy in dict.fromkeys(policies) if policy != BOUND]
    for policy in sorted(names, key=lambda name: _ALIKE.get(name, name) not in _LOOKS):
        taken = set(found.values())
        found[policy] = next(look for look in _candidates(policy) if look not in taken or look.dash == ":")
    return found


def _candidates(policy: str) -> list[Look]:
    base = policy.partition(":")[0]
    own = [look for name, look in _LOOKS.items() if name == _ALIKE.get(base, base)]
    return [Look(*look, dash) for dash in ("-", "--", ":") for look in (*own, *_LOOKS.values())]
