"""Offline: replay a workload under every policy, with the optimum beside it."""

from hotset.sim.curve import LruCurve, lru_curve
from hotset.sim.link import Link
from hotset.sim.rows import Row
from hotset.sim.simulate import SWEEP, Result, Sweep, simulate

__all__ = ["SWEEP", "Link", "LruCurve", "Result", "Row", "Sweep", "lru_curve", "simulate"]
