"""The colours of figures: scales of ten levels, and lines that people with any colour vision tell apart."""

from __future__ import annotations

LEVELS = 10
"""Steps of a scale from low to high: classes q0 to q9."""
SIDES = 4
"""Steps on each side of a scale around a middle: classes d0 to d8."""
SERIES = 8
"""Colours of lines and bars: classes s0 to s7."""

_LIGHT = {
    "ink": "#1c2128", "soft": "#59626e", "line": "#d5dbe2", "page": "#ffffff", "panel": "#f5f7f9",
    "blank": "#eceff2", "dead": "#f0b3cd", "hit": "#0072b2", "miss": "#d55e00", "idle": "#d3d8de",
}  # fmt: skip
_DARK = {
    "ink": "#e3e8ee", "soft": "#99a4b1", "line": "#323b46", "page": "#12161b", "panel": "#1a2027",
    "blank": "#20262e", "dead": "#6b2b4c", "hit": "#4aa8e0", "miss": "#ff8a3d", "idle": "#39424d",
}  # fmt: skip
_SCALE_LIGHT = ("#edf2f7", "#bfd6e8", "#6fa6d0", "#2a6fab", "#0b2f59")
_SCALE_DARK = ("#1c252f", "#1f4466", "#2f73a8", "#74b6e6", "#dff2ff")
_SIDES_LIGHT = ("#1f5f99", "#9cc3e2", "#f1f3f5", "#f3b382", "#b8430a")
_SIDES_DARK = ("#7cc0f4", "#2c5c85", "#222a32", "#8a4a1e", "#ff9d57")
_SERIES_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d00", "#56b4e9", "#6a3d9a", "#7f7f7f")
_SERIES_DARK = ("#4aa8e0", "#ff8a3d", "#2fc79a", "#e59bc6", "#e0b83a", "#8fd0f5", "#b08be0", "#a8a8a8")


def _mixed(stops: tuple[str, ...], share: float) -> str:
    """The colour at a share of the way along several."""
    place = share * (len(stops) - 1)
    first = min(int(place), len(stops) - 2)
    ends = [[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops[first : first + 2]]
    mixed = (round(a + (b - a) * (place - first)) for a, b in zip(*ends, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _variables(names: dict[str, str], scale: tuple[str, ...], sides: tuple[str, ...], series: tuple[str, ...]) -> str:
    found = dict(names)
    found |= {f"q{i}": _mixed(scale, i / (LEVELS - 1)) for i in range(LEVELS)}
    found |= {f"d{i}": _mixed(sides, i / (2 * SIDES)) for i in range(2 * SIDES + 1)}
    found |= {f"s{i}": color for i, color in enumerate(series)}
    return "".join(f"--{name}:{color};" for name, color in found.items())


_FILLS = [
    *(f"q{i}" for i in range(LEVELS)),
    *(f"d{i}" for i in range(2 * SIDES + 1)),
    *(f"s{i}" for i in range(SERIES)),
]
_PLAIN = ("blank", "dead", "hit", "miss", "idle")

VARIABLES = (
    f":root{{color-scheme:light dark;{_variables(_LIGHT, _SCALE_LIGHT, _SIDES_LIGHT, _SERIES_LIGHT)}}}"
    f"@media (prefers-color-scheme:dark){{:root{{{_variables(_DARK, _SCALE_DARK, _SIDES_DARK, _SERIES_DARK)}}}}}"
    f"@media print{{:root{{color-scheme:light;{_variables(_LIGHT, _SCALE_LIGHT, _SIDES_LIGHT, _SERIES_LIGHT)}}}}}"
)
"""All colours as CSS variables: light, dark where that is preferred, and light on paper."""

CLASSES = (
    ".fig text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:var(--ink)}"
    ".fig .soft{fill:var(--soft)}.fig .small{font-size:10.5px;fill:var(--soft)}.fig .strong{font-weight:600}"
    ".fig .over{paint-order:stroke;stroke:var(--page);stroke-width:3px}"
    ".fig .rule{stroke:var(--line);fill:none;stroke-width:1}.fig .axis{stroke:var(--soft);fill:none;stroke-width:1}"
    ".fig .dash{stroke:var(--soft);fill:none;stroke-dasharray:4 4;stroke-width:1.3}"
    ".fig .edge{fill:none;stroke:var(--ink);stroke-width:1.5}"
    + "".join(f".fig .{name}{{fill:var(--{name})}}" for name in (*_FILLS, *_PLAIN))
    + "".join(f".fig .l{i}{{stroke:var(--s{i});fill:none;stroke-width:2;stroke-linejoin:round}}" for i in range(SERIES))
    + "".join(f".fig .b{i}{{fill:var(--s{i});opacity:.18}}" for i in range(SERIES))
    + ".fig .far{stroke-dasharray:6 4}"
)
"""How the elements of figures look."""

STYLE = VARIABLES + "svg{background:var(--page)}" + CLASSES
