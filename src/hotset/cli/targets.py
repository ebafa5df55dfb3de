"""Files that a command is to write: what cannot be written is refused before the work and not after it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotset.errors import HotsetError
from hotset.files import check_place

ForceFlag = Annotated[bool, typer.Option("--force", help="Overwrite the output if it exists.")]


def refuse_existing(force: bool, *paths: Path | None) -> None:
    """Refuse to overwrite a file unless that was asked for, and to write to the name of a folder."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise HotsetError(f"{path} is a folder: give the name of a file")
        if (path.exists() or path.is_symlink()) and not force:
            raise HotsetError(f"{path} exists: choose another name, or pass --force to overwrite it")


def check_out(path: Path | None, force: bool) -> None:
    """Refuse an output that cannot be written."""
    if path is None:
        return
    refuse_existing(force, path)
    if not path.parent.is_dir():
        raise HotsetError(f"there is no folder {path.parent}: create it, or choose another place")
    check_place(path)


def check_table(path: Path | None) -> None:
    """Refuse a table that cannot be written; one that is there is written anew."""
    check_out(path, force=True)


def check_figure(path: Path | None) -> None:
    """Refuse a figure that cannot be drawn."""
    if path is not None:
        from hotset.report import check_plot

        check_plot(path)
