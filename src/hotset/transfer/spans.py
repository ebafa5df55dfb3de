"""Byte ranges merged into as few reads as possible, and long ones cut so that threads can share them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hotset.store.catalog import Segment
from hotset.store.layout import PAGE_BYTES

CHUNK_BYTES = (2 << 20) - 2 * PAGE_BYTES
"""With the pages at its ends that are not asked for, a read fills one huge page at most."""


class Run(NamedTuple):
    """Bytes that stay together on their way from the file to memory."""

    offset: int
    size_bytes: int
    target: int


class Span(NamedTuple):
    """One read: neighbouring bytes of a file that may part in memory."""

    file: int
    offset: int
    size_bytes: int
    target: int
    straight: bool  # aligned at both ends, so that a direct read needs no detour
    runs: tuple[Run, ...]


def chunks(segments: Sequence[Segment], chunk_bytes: int) -> list[Span]:
    """The reads for some segments: neighbours merged, none longer than a chunk by much."""
    spans: list[Span] = []
    group: list[Segment] = []
    for segment in sorted(segments):
        for piece in _cut(segment, chunk_bytes):
            if group and not _joins(group, piece, chunk_bytes):
                spans.append(_span(group))
                group = []
            group.append(piece)
    return [*spans, _span(group)] if group else spans


def _cut(segment: Segment, chunk_bytes: int) -> list[Segment]:
    """Cut at multiples of a page, counted from the start of the segment."""
    starts = range(0, segment.size_bytes, chunk_bytes)
    return [
        Segment(segment.file, segment.offset + at, min(chunk_bytes, segment.size_bytes - at), segment.target + at)
        for at in starts
    ]


def _joins(group: list[Segment], piece: Segment, chunk_bytes: int) -> bool:
    last = group[-1]
    adjacent = last.file == piece.file and last.offset + last.size_bytes == piece.offset
    return adjacent and sum(segment.size_bytes for segment in group) + piece.size_bytes <= chunk_bytes


def _span(group: list[Segment]) -> Span:
    first = group[0]
    size = sum(segment.size_bytes for segment in group)
    together = all(s.target - first.target == s.offset - first.offset for s in group)
    aligned = not (first.offset % PAGE_BYTES or first.target % PAGE_BYTES or size % PAGE_BYTES)
    runs = (
        (Run(first.offset, size, first.target),)
        if together
        else tuple(Run(s.offset, s.size_bytes, s.target) for s in group)
    )
    return Span(first.file, first.offset, size, first.target, together and aligned, runs)
