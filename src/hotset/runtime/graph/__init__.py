"""Decode driven by the device: which experts are missing, where they go and who leaves, without asking the host."""
