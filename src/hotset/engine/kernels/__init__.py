"""How some experts of an event are computed from rows of memory: per expert, grouped, or in two Triton launches."""
