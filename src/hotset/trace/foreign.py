"""What a file is that is no trace, as far as its first bytes tell: so that a message can name the way to import it."""

from __future__ import annotations

import codecs
from contextlib import suppress
from pathlib import Path

from hotset.reading import open_regular

_HEAD_BYTES = 4096
_BEGINNINGS = {
    b"PK\x03\x04": "a zip archive, as .npz and .pt files are",
    b"PAR1": "a parquet file",
    b"\x93NUMPY": "an array of numpy",
    b"\x1f\x8b": "compressed by gzip",
}


def foreign_kind(path: Path) -> str | None:
    """A few words for archives, arrays, JSON and text; None for all else, damaged traces among it."""
    head = b""
    with suppress(OSError), open_regular(path) as file:
        head = file.read(_HEAD_BYTES)
    for beginning, words in _BEGINNINGS.items():
        if head.startswith(beginning):
            return words
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head)  # a letter may be cut at the end
    except UnicodeDecodeError:
        return None
    if not text.strip() or any(letter < " " and letter not in "\t\r\n\f" for letter in text):
        return None
    return "JSON" if text.lstrip()[0] in "{[" else "text"
