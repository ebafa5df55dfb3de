"""A profile as CSV, for spreadsheets and data frames."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from io import StringIO

from hotset.profile.profile import PINNED, RESIDENT, Profile
from hotset.trace import Phase

FIELDS = ("layer", "expert", "prefill_uses", "decode_uses", "hotness", "hits", "misses", "resident", "pinned")


def to_csv(profile: Profile) -> str:
    """A header and one line per expert; what the profile does not keep is empty."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FIELDS)
    writer.writerows(_rows(profile))
    return text.getvalue()


def _rows(profile: Profile) -> Iterator[list[object]]:
    hotness, residency = profile.hotness(), profile.residency
    hits, misses = (None if counts is None else counts.sum(axis=0) for counts in (profile.hits, profile.misses))
    resident, pinned = (None if residency is None else (residency & bit > 0).astype(int) for bit in (RESIDENT, PINNED))
    columns = [profile.uses[Phase.PREFILL], profile.uses[Phase.DECODE], hotness, hits, misses, resident, pinned]
    for layer in range(profile.shape.layers):
        for expert in range(profile.shape.experts):
            values = (None if column is None else column[layer, expert].item() for column in columns)
            yield [layer, expert, *values]
