"""How expert bytes move: reader threads that fill slots straight from the store's files."""

from hotset.transfer.flight import Flight
from hotset.transfer.readers import Readers

__all__ = ["Flight", "Readers"]
