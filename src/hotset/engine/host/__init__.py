"""The driver that the host runs: looks up each event, moves what is missing, and computes meanwhile."""
