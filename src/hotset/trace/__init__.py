"""What was routed: events, traces, their file format and importers."""

from hotset.trace.event import Event, Phase
from hotset.trace.trace import NONE, Trace

__all__ = ["NONE", "Event", "Phase", "Trace"]
