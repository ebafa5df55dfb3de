"""Drawing in one style whatever a person's own is, and writing figures whole or not at all."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotset.errors import HotsetError
from hotset.files import write_beside
from hotset.report.plot_style import SETTINGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Without a date the same rows give the same bytes.
_FORMATS: dict[str, dict[str, Any]] = {
    "png": {"Software": "hotset"},
    "svg": {"Creator": "hotset", "Date": None},
    "pdf": {"Creator": "hotset", "CreationDate": None},
}


def check_format(path: Path) -> None:
    """Raise unless the suffix names a format that can be drawn, and matplotlib is there to draw it."""
    _format(path)
    _matplotlib()


@contextmanager
def drawing() -> Iterator[None]:
    """Draw in our own style inside this block, and leave the person's as it was."""
    matplotlib = _matplotlib()
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a name in a script the font lacks
        matplotlib.rcdefaults()  # a person's own style must not break the layout
        matplotlib.rcParams.update(SETTINGS)
        yield


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure, inside `drawing`; the suffix (.png, .svg, .pdf) decides the format."""
    kind = _format(path)
    with write_beside(path) as scratch:
        figure.savefig(scratch, format=kind, metadata=_FORMATS[kind])


def _format(path: Path) -> str:
    kind = path.suffix.lower().removeprefix(".")
    if kind not in _FORMATS:
        raise HotsetError(f'cannot draw "{path}": the name must end in .png, .svg or .pdf')
    return kind


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise HotsetError('plots need matplotlib: pip install "hotset[plot]"') from None
    return matplotlib
