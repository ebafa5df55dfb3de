"""How expert bytes move: reader threads that fill slots straight from the store's files."""

from hotset.transfer.readers import Readers
from hotset.transfer.reads import ReadTransfer

__all__ = ["ReadTransfer", "Readers"]
