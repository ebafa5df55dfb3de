"""A figure that notebooks show; kept apart because it cannot be defined without matplotlib."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure

from hotset.report.plot_file import drawing

_SCREEN_DPI = 100


class HeatFigure(Figure):
    """A figure that shows itself in a notebook even where pyplot was not imported."""

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        with drawing():
            self.savefig(buffer, format="png", dpi=_SCREEN_DPI)
        return buffer.getvalue()
