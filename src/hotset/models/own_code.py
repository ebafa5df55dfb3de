"""Models that bring Python code of their own: it runs when it was asked for by name, and otherwise never."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hotset.errors import ModelError


@contextmanager
def refusing_own_code(place: str) -> Iterator[None]:
    """Turn the library's refusal to run a model's code into one line that names the option."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ModelError(needs_own_code(place)) from error


def needs_own_code(place: str) -> str:
    """What to say of a model that cannot be loaded without its own code."""
    return (
        f"{place} needs Python code of its own: read it, and if you trust it pass --trust-remote-code "
        "(trust_remote_code=True in Python), or use a model that transformers supports"
    )
