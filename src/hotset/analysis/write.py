"""Writes the report: the HTML, and beside it a folder with its data as JSON, CSV and SVG."""

from __future__ import annotations

import json
from pathlib import Path

from hotset.analysis.analyse import Analysis
from hotset.analysis.document import to_document, to_tables
from hotset.analysis.page import to_page
from hotset.errors import HotsetError
from hotset.files import write_beside
from hotset.plain import plain

DOCUMENT = "report.json"


def data_folder(out: Path) -> Path:
    """Where the data of a report goes: a folder of the same name without the suffix."""
    return out.with_suffix("") if out.suffix else out.with_name(f"{out.name}.data")


def write_report(analysis: Analysis, out: Path, *, data: bool = True, version: str = "") -> list[Path]:
    """Write the report, the page last; every file is whole or not there. Returns what was written, the page first."""
    page, figures = to_page(analysis, version=version)
    files: dict[Path, str] = {}
    if data:
        folder = data_folder(out)
        _make(folder)
        texts = to_tables(analysis) | {f"{figure.name}.svg": figure.standalone() for figure in figures}
        document = to_document(analysis) | {"files": sorted(texts)}
        _remove_earlier(folder, set(texts))
        files = {folder / name: text for name, text in texts.items()}
        files[folder / DOCUMENT] = json.dumps(plain(document), allow_nan=False) + "\n"
    files[out] = page
    for path, text in files.items():
        with write_beside(path) as scratch:
            scratch.write_text(text, encoding="utf-8")
    return [out, *(path for path in files if path != out)]


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise HotsetError(f"cannot make the folder {folder}: {error.strerror}; choose another place with -o") from error


def _remove_earlier(folder: Path, names: set[str]) -> None:
    """Remove what an earlier report wrote here, as it says itself, and this one will not write over."""
    try:
        listed = json.loads((folder / DOCUMENT).read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    for name in listed if isinstance(listed, list) else ():
        if isinstance(name, str) and name == Path(name).name and name.endswith((".csv", ".svg")) and name not in names:
            (folder / name).unlink(missing_ok=True)
