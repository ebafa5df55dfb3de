"""Which experts are resident: the slot table, the controller that serves events, and its counters."""

from hotset.cache.controller import Controller, Served
from hotset.cache.counters import Counters
from hotset.cache.plan import Scope, SlotPlan

__all__ = ["Controller", "Counters", "Scope", "Served", "SlotPlan"]
