"""The digests by which a packed store knows its bytes again.

Every expert is checked the first time it is read, so its digest must keep up with the disk: a CRC finds what disks do
to bytes (flipped bits, bursts, lost and stale sectors) at several times the speed of a cryptographic digest. Later ones
are checked by the sum of their words alone, at the speed of memory: no single flipped bit and no lost page leaves that
as it was. Files that are read from end to end only on demand get a cryptographic digest.
"""

from __future__ import annotations

import hashlib
import zlib

import numpy as np

from hotset.store.catalog import Bytes

DIGEST_BYTES = 16
_WORD = np.dtype("<u8")


def digest_of(block: Bytes) -> bytes:
    """The digest that a packed store keeps of every expert: its CRC, the sum of its words and its length."""
    parts = zlib.crc32(block.data).to_bytes(4, "little"), _sum_of(block)
    return b"".join(parts) + (len(block) % 2**32).to_bytes(4, "little")


def same_sum(block: Bytes, digest: bytes) -> bool:
    """Whether a block has the sum of words that a digest tells."""
    return _sum_of(block) == digest[4:12]


def _sum_of(block: Bytes) -> bytes:
    words = block[: len(block) // _WORD.itemsize * _WORD.itemsize].view(_WORD)
    return int(words.sum(dtype=np.uint64)).to_bytes(8, "little")


def new_digest() -> hashlib.blake2b:
    """A digest of a whole file or document, to be fed piece by piece."""
    return hashlib.blake2b(digest_size=DIGEST_BYTES)
