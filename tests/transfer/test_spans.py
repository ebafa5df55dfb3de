"""However byte ranges are merged and cut, every byte lands where its segment says, read either way."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_samples import catalog_of, load_all, naive, slots_of, write

from hotset.store import PAGE_BYTES, Segment
from hotset.store.layout import round_up
from hotset.transfer import Readers, readers
from hotset.transfer.spans import chunks

FILE_BYTES = 9 * PAGE_BYTES + 1234
CHUNKS = (PAGE_BYTES, 2 * PAGE_BYTES, 4 << 20)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("spans")
    return [write(folder / f"{seed}.bin", FILE_BYTES, seed) for seed in range(2)]


@st.composite
def segment_lists(draw: st.DrawFn) -> list[Segment]:
    """Ranges of two files, often adjacent and often aligned, each with room of its own in memory."""
    edges = st.one_of(st.integers(0, FILE_BYTES), st.integers(0, 9).map(lambda page: page * PAGE_BYTES))
    ranges = []
    for file in range(2):
        cuts = sorted(set(draw(st.lists(edges, min_size=2, max_size=9))))
        kept = [pair for pair in pairwise(cuts) if draw(st.integers(0, 3))]
        ranges += [(file, begin, end - begin) for begin, end in kept]
    random.Random(draw(st.integers(0, 99))).shuffle(ranges)  # noqa: S311
    segments, at = [], 0
    for file, offset, size in ranges:
        at = round_up(at, PAGE_BYTES) if draw(st.booleans()) else at + draw(st.integers(0, 3))
        segments.append(Segment(file, offset, size, at))
        at += size
    if draw(st.booleans()):
        segments.sort(key=lambda s: (s.file, s.offset))
    return segments


@given(segment_lists(), st.sampled_from(CHUNKS))
@settings(max_examples=300, deadline=None)
def test_spans_cover_every_byte_once(segments: list[Segment], chunk_bytes: int) -> None:
    wanted = {(s.file, s.offset + i, s.target + i) for s in segments for i in range(0, s.size_bytes, 97)}
    found = []
    for span in chunks(segments, chunk_bytes):
        assert sum(run.size_bytes for run in span.runs) == span.size_bytes <= max(chunk_bytes, 1)
        found += [(span.file, run) for run in span.runs]
        if span.straight:
            assert span.offset % PAGE_BYTES == span.target % PAGE_BYTES == span.size_bytes % PAGE_BYTES == 0
            assert len(span.runs) == 1
    assert sum(run.size_bytes for _, run in found) == sum(s.size_bytes for s in segments)
    for file, at, target in wanted:
        assert any(
            f == file and run.offset <= at < run.offset + run.size_bytes and target - run.target == at - run.offset
            for f, run in found
        )


@pytest.mark.parametrize("direct", [True, False])
@given(segments=segment_lists(), chunk_bytes=st.sampled_from(CHUNKS))
@settings(max_examples=60, deadline=None)
def test_bytes_land_as_a_naive_reader_puts_them(
    files: list[Path], segments: list[Segment], chunk_bytes: int, direct: bool
) -> None:
    size = round_up(max((s.target + s.size_bytes for s in segments), default=1), PAGE_BYTES)
    slots = slots_of(1, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "CHUNK_BYTES", chunk_bytes)
        reading = Readers(catalog_of(files, [segments], size), slots.__getitem__, threads=2, direct=direct)
        load_all(reading, 1)
        reading.close()
    assert slots[0].tobytes() == naive(files, segments, size)


def test_neighbours_become_one_read_and_a_long_one_is_shared() -> None:
    near = [Segment(0, 100, 50, 0), Segment(0, 150, 30, 64), Segment(0, 200, 8, 128)]
    assert [(s.offset, s.size_bytes, len(s.runs)) for s in chunks(near, 1 << 20)] == [(100, 80, 2), (200, 8, 1)]
    assert [s.size_bytes for s in chunks([Segment(0, 0, 10 * PAGE_BYTES, 0)], 4 * PAGE_BYTES)] == [
        4 * PAGE_BYTES,
        4 * PAGE_BYTES,
        2 * PAGE_BYTES,
    ]
