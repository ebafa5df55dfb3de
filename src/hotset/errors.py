"""Errors that are the input's fault: the command line prints them in one line and exits with 2."""

from __future__ import annotations

from hotset.text import printable


class HotsetError(Exception):
    """Something given to hotset is wrong; the message names what, and the remedy, and is safe to print."""

    def __str__(self) -> str:
        return printable(super().__str__())


class BudgetError(HotsetError):
    """A memory budget that cannot be read or cannot work."""


class TraceError(HotsetError):
    """A routing trace that is not valid, or a file that is not a trace."""


class PolicyError(HotsetError):
    """A policy that does not exist, or an option that it does not have."""


class FormatError(HotsetError):
    """A weight format that does not exist, or that a matrix cannot have."""


class StoreError(HotsetError):
    """A file with expert weights that is damaged, missing or of a kind that cannot be read."""


class ModelError(HotsetError):
    """A model that hotset cannot run, or not in this way."""


class ClosedError(ModelError):
    """A call of a model that was closed."""

    def __init__(self) -> None:
        super().__init__("this model is closed and its experts are gone: load it again")


class ForkError(ModelError):
    """A call, in a forked process, of a model that another process loaded."""

    def __init__(self) -> None:
        super().__init__(
            "this model was loaded before the process forked, and runs only in the parent: "
            "load it in the child, or start children by spawn"
        )


class ProfileError(HotsetError):
    """A profile that is damaged, or of another model."""


class StopAsked(Exception):  # noqa: N818 - it reports a wish, not an error
    """The user asked to stop: code that catches failures lets this pass."""
