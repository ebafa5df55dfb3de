"""Offline: replay a workload under every policy, with the optimum beside it."""

from hotset.sim.curve import LruCurve, lru_curve
from hotset.sim.link import Link
from hotset.sim.rows import Row
from hotset.sim.simulate import Result, count_jobs, simulate
from hotset.sim.sweep import Sweep

__all__ = ["Link", "LruCurve", "Result", "Row", "Sweep", "count_jobs", "lru_curve", "simulate"]
