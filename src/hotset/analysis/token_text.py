"""The text of tokens, by a tokenizer.json; without torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hotset.errors import HotsetError
from hotset.reading import TooLargeError, read_bounded

Decode = Callable[[int], str]
"""The text of a token; empty where it has none of its own."""
NAME = "tokenizer.json"
_MAX_BYTES = 256 << 20
_BROKEN = "\ufffd"  # a token that is part of a letter


def has_tokenizers() -> bool:
    """Whether the library that reads tokenizers is there."""
    return find_spec("tokenizers") is not None


def from_file(place: Path) -> Decode:
    """Read a tokenizer.json, or that of a folder."""
    if not has_tokenizers():
        raise HotsetError("the text of tokens needs the tokenizers library: pip install 'hotset[models]'")
    from tokenizers import Tokenizer

    file = place / NAME if place.is_dir() else place
    try:
        tokenizer = Tokenizer.from_str(read_bounded(file, _MAX_BYTES).decode())
    except OSError as error:
        raise HotsetError(f"cannot read {file}: {error.strerror or error}; give a {NAME} or its folder") from None
    except (TooLargeError, UnicodeDecodeError) as error:
        raise HotsetError(f"{file} is no {NAME}: {error}") from None
    except Exception as error:  # the library raises nothing more particular
        raise HotsetError(f"{file} is no {NAME} that this machine's tokenizers library reads: {error}") from None
    return text_by(lambda ids: tokenizer.decode(ids, skip_special_tokens=False))


def text_by(decode: Callable[[list[int]], Any]) -> Decode:
    """The text of single tokens by what decodes lists of them."""

    @lru_cache(maxsize=1 << 16)
    def text_of(token: int) -> str:
        try:
            text = str(decode([token]))
        except Exception:  # an id beyond the vocabulary is an error in some libraries, and no text in others
            return ""
        return "" if _BROKEN in text else text

    return text_of
