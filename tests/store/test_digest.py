"""The digest of an expert changes with whatever disks do to bytes, and keeps up with them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hotset.store.catalog import Bytes
from hotset.store.digest import DIGEST_BYTES, digest_of

SIZE = 3 * 4096 + 13


def noise(seed: int = 0, size: int = SIZE) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@given(st.integers(0, SIZE - 1), st.integers(0, 7))
def test_any_flipped_bit_is_seen(at: int, bit: int) -> None:
    damaged = noise()
    damaged[at] ^= 1 << bit
    assert digest_of(damaged) != digest_of(noise())


@given(st.integers(0, SIZE - 1), st.integers(1, 600), st.sampled_from([0, 255]))
def test_a_lost_run_of_bytes_is_seen(at: int, size: int, value: int) -> None:
    damaged = noise()
    damaged[at : at + size] = value
    assert (digest_of(damaged) != digest_of(noise())) == (not np.array_equal(damaged, noise()))


def test_swapped_sectors_words_and_lengths_are_seen() -> None:
    block = noise()
    swapped = np.concatenate([block[4096:8192], block[:4096], block[8192:]])
    words = np.concatenate([block[8:16], block[:8], block[16:]])
    zeros = [np.zeros(size, np.uint8) for size in (0, 1, 7, 8, 4096, 4097)]
    digests = [digest_of(each) for each in (block, swapped, words, block[:-1], *zeros)]
    assert len(set(digests)) == len(digests)
    assert {len(digest) for digest in digests} == {DIGEST_BYTES}


def test_where_the_bytes_lie_does_not_matter() -> None:
    shifted = np.empty(SIZE + 3, np.uint8)
    shifted[3:] = noise()
    assert digest_of(shifted[3:]) == digest_of(noise())
