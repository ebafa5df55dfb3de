"""The digest by which a packed store knows its bytes again."""

from __future__ import annotations

import hashlib

from hotset.store.catalog import Bytes

DIGEST_BYTES = 16


def new_digest() -> hashlib.blake2b:
    """A digest to be fed piece by piece."""
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


def digest_of(block: Bytes | bytes) -> bytes:
    """The digest that a packed store keeps of every expert."""
    return hashlib.blake2b(block if isinstance(block, bytes) else block.data, digest_size=DIGEST_BYTES).digest()
