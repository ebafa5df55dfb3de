"""Whose files: what belongs to a model lies in its folder, and no name in an index and no link leads out of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hotset.errors import StoreError


def check_inside(folder: Path, files: Iterable[Path]) -> None:
    """Raise StoreError for a file outside a model's folder or a link out of it, but for links into the hub's cache."""
    lexical, real = _normal(folder), folder.resolve()
    for file in files:
        if not _normal(file).is_relative_to(lexical):
            raise StoreError(
                f"{file} lies outside {folder}: an index names files of the model's own folder only; download it again"
            )
        target = file.resolve()
        if not target.is_relative_to(real) and not _is_blob(target):
            raise StoreError(
                f"{file} is a link to {target}, outside the model's folder: put the file itself there, or remove it"
            )


def folder_of(place: str, files: Iterable[Path]) -> Path:
    """The folder that a model's files belong to: the one that was named, or the hub's snapshot."""
    if place and Path(place).is_dir():
        return Path(place)
    first = _normal(next(iter(files)))
    return next((above for above in first.parents if above.parent.name == "snapshots"), first.parent)


def refuse_links(folder: Path) -> None:
    """Raise StoreError if a folder that will be written into, or anything in it, is a link or has another name."""
    for path in (folder, *_below(folder)):
        found = path.lstat()
        if path.is_symlink() or (found.st_nlink > 1 and path.is_file()):
            raise StoreError(f"{path} is a link, and nothing is written through links: remove {folder} first")


def _below(folder: Path) -> Iterable[Path]:
    for where, folders, files in os.walk(folder):  # which does not follow links
        yield from (Path(where, name) for name in (*folders, *files))


def _normal(path: Path) -> Path:
    return Path(os.path.normpath(path.absolute()))


def _is_blob(target: Path) -> bool:
    """Whether a file lies in a cache of the hub: its snapshots are links to the blobs beside them."""
    return target.parent.name == "blobs" and (target.parent.parent / "snapshots").is_dir()
