"""The answer in words: which policy, how much memory, how far from the best possible."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from hotset.report.words import BOUND, LRU, expert_bytes, percent, plural
from hotset.shape import format_size
from hotset.text import printable

if TYPE_CHECKING:
    from hotset.sim import Result, Row

TARGETS = (0.8, 0.9)
"""The decode hit rates that people size memory for."""


def recommendation(result: Result) -> str | None:
    """Per trace, the best causal policy, the memory it needs, and its distance from the optimum."""
    traces = list(dict.fromkeys(row.trace for row in result.rows))
    sentences = [_advise([row for row in result.rows if row.trace == trace]) for trace in traces]
    return "\n".join(text for text in sentences if text) or None


def _advise(rows: list[Row]) -> str | None:
    judged = [row for row in rows if row.phase == "decode" and row.start == "cold"]
    causal = _by_policy([row for row in judged if row.policy != BOUND])
    if not causal:
        return None
    policy = max(causal, key=lambda name: _mean(causal[name]))
    best, does_best = causal[policy], " does best and" if len(causal) > 1 else ""
    needs = _needs(best, expert_bytes(rows))
    bound = [row for row in judged if row.policy == BOUND]
    sentences = (f"{printable(best[0].trace)}: {printable(policy)}{does_best} {needs}.", _distance(best, bound))
    return " ".join(filter(None, (*sentences, _speed(best))))


def _by_policy(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of each policy by rising budget; a policy that lacks a budget cannot be compared by its mean."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.budget_slots):
        found.setdefault(row.policy, []).append(row)
    most = max(map(len, found.values()), default=0)
    return {policy: own for policy, own in found.items() if len(own) == most}


def _mean(rows: list[Row]) -> float:
    return fmean(row.hit_rate for row in rows)


def _needs(rows: list[Row], size: float | None) -> str:
    """The smallest budget for each target, or how near the sweep comes."""
    enough = {target: next((row for row in rows if row.hit_rate >= target), None) for target in TARGETS}
    missed = [target for target, row in enough.items() if row is None]
    reached = {row.budget_slots: (target, row) for target, row in enough.items() if row is not None}
    words = [f"{percent(target, 0)} with {_memory(row, size)}" for target, row in reached.values()]
    text = f"reaches a decode hit rate of {' and '.join(words)}" if words else ""
    if not missed:
        return text
    top = max(rows, key=lambda row: row.hit_rate)
    target, best = percent(missed[0], 0), f"{percent(top.hit_rate)} with {_memory(top, size)}"
    if text:
        return f"{text}; no budget of this sweep reaches {target}, the highest is {best}"
    return f"reaches a decode hit rate of {target} with no budget of this sweep: the highest is {best}"


def _memory(row: Row, size: float | None) -> str:
    slots = plural(row.budget_slots, "slot")
    held = f"{slots}, {format_size(row.budget_slots * size)}" if size else slots
    return f"{100 * row.budget_fraction:.3g} % of the experts ({held})"


def _distance(best: list[Row], bound: list[Row]) -> str:
    """How far the policy stays from the optimum over the same budgets."""
    if not bound:
        return ""
    short = _mean(bound) - _mean(best)
    if short < 5e-4:
        return "That is the best possible: Belady, which knows the future, hits no more."
    optimum = f"{100 * short:.1f} points below the best possible (Belady, which knows the future)"
    gaps = [row.gap_closed for row in best if row.gap_closed is not None]
    if best[0].policy == LRU or not gaps:
        return f"On average over the budgets that is {optimum}."
    return f"On average over the budgets it closes {percent(fmean(gaps), 0)} of the gap from LRU and stays {optimum}."


def _speed(best: list[Row]) -> str:
    """How near the policy comes to the least time over the link, on average over the same budgets."""
    shares = [row.bound_share for row in best if row.bound_share is not None]
    if not shares:
        return ""
    return f"Over this link it reaches {percent(fmean(shares), 0)} of the time bound."
