"""Prefetch: what is brought before it is asked for, by which rules, and whether that pays; torch-free.

The simulator and both drivers judge by one trial (`trial`) and merge the predictions of several tokens by one rule
(`votes`). The rules of each driver are one plan (`plan`), which it follows, and the simulator as well.
"""

from hotset.prefetch.plan import MIN_PROBABILITY, Claim, Driver, PrefetchPlan, plan_prefetch, prefetch_rows
from hotset.prefetch.switch import PrefetchTrial

__all__ = ["MIN_PROBABILITY", "Claim", "Driver", "PrefetchPlan", "PrefetchTrial", "plan_prefetch", "prefetch_rows"]
