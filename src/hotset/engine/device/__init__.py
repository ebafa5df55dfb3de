"""Decode steps that the device drives: captured once, replayed, and followed by the host a step later."""
