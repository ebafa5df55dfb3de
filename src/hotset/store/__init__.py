"""Where expert bytes live: byte ranges in the checkpoint's own files, or one aligned block each in a packed store."""

from hotset.store.catalog import Catalog, LayerSource, Segment
from hotset.store.layout import PAGE_BYTES, Matrix, Part, SlotLayout

__all__ = ["PAGE_BYTES", "Catalog", "LayerSource", "Matrix", "Part", "Segment", "SlotLayout"]
