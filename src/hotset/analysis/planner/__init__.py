"""Which precision, how much memory on which tier, and how many tokens per second: the simulator with measured rates."""
