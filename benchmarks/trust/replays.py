"""Random live runs, each recorded and replayed as `hotset simulate TRACE --fit 0` does: the counts are the run's.

Policies with options, both scopes, budgets in bytes, shares and slots, staging, prefetch and prompts are drawn at
random; the model is the one that ships with hotset. Each recording goes through its file. Where a run began warm, the
recording must say that a replay differs.

    python benchmarks/trust/replays.py --count 200 --seed 0
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hotset
from hotset import reference
from hotset.errors import BudgetError
from hotset.sim import Sweep, simulate
from hotset.trace import Trace
from hotset.trace.run import Run

from common import publish

POLICIES = (
    "blend", "lru", "lfu", "lfru", "slru", "slru:protected=0.5", "slru:hint=on", "window", "window:tokens=16", "decay",
    "decay:half_life=8", "eam", "layered", "static", "lru:admit=score", "lfu:admit=late",
    "nextuse", "nextuse:streams=2", "nextuse:admit=score", "class_lru",
)  # fmt: skip
PREFETCH = ("off", "auto", "auto", "best", "gate", "transition", "previous")
COUNTS = {"hits": "hits", "misses": "misses", "evictions": "evicted", "staged": "staged"}


@dataclass
class Case:
    """One live run, and how its replay compares."""

    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    prompts: list[int] = field(default_factory=list)
    outcome: str = ""
    slots: int = 0
    staging: int = 0
    ahead: int = 0
    misses: int = 0


def draw(seed: int, size_bytes: int, experts: int) -> tuple[Case, random.Random]:
    """Random settings."""
    rng = random.Random(seed)  # noqa: S311 - chance, not secrets
    share = rng.uniform(0.06, 0.7)
    budgets = (f"{int(share * size_bytes)}", f"{max(int(share * experts), 1)} slots", f"{100 * share:.1f}%")
    options: dict[str, Any] = {
        "memory": rng.choice(budgets),
        "policy": rng.choice(POLICIES),
        "scope": rng.choice(("layer", "pool")),
        "prefetch": rng.choice(PREFETCH),
    }
    if rng.random() < 0.25:
        options["staging"] = rng.choice((1, 2, 5))
    return Case(seed, options, [rng.choice((1, 3, 12, 40)) for _ in range(rng.choice((1, 2, 3)))]), rng


def run_live(case: Case, rng: random.Random, path: Path) -> tuple[dict[str, Any], bool]:
    """Record the prompts; returns what the cache counted, and whether it began warm."""
    with hotset.load(reference.path(), **case.options).hotset as handle:
        model, warm = handle._model(), rng.random() < 0.1
        if warm:
            answer(model, rng, 5)
            handle.reset_stats()
        with handle.trace(path):
            for tokens in case.prompts:
                answer(model, rng, tokens)
        plan = handle.engine.controller.plan
        case.slots, case.staging, case.ahead = plan.cached, plan.staging, plan.prefetch_rows
        return handle.stats(), warm


def answer(model: Any, rng: random.Random, tokens: int) -> None:
    """A prompt of random words, and a few new tokens."""
    ids = torch.tensor([[rng.randrange(3, 400) for _ in range(tokens)]])
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=rng.choice((1, 4, 14)), do_sample=False, pad_token_id=0
    )


def compare(case: Case, stats: dict[str, Any], warm: bool, path: Path) -> str:
    """How the replay's cold row differs from the run, or that it does not."""
    trace = Trace.load(path)
    run = Run.of(trace)
    if run is None:
        return "the recording does not say which cache it ran with"
    if warm or run.differs:
        return "began warm, and says so" if warm and run.differs else f"warm: {warm}, but it says {run.differs!r}"
    rows = simulate({"t": trace}, Sweep(fit=0)).rows
    for phase in ("prefill", "decode"):
        own = [
            r for r in rows if (r.policy, r.phase, r.start, r.budget_slots) == (run.policy, phase, "cold", run.slots)
        ]
        if not own and not stats[phase]["events"]:
            continue
        found = {name: getattr(own[0], name) for name in COUNTS} if own else {}
        wanted = {name: stats[phase][live] for name, live in COUNTS.items()}
        if found != wanted or own[0].scope != case.options["scope"]:
            return f"{phase}: the run had {wanted}, its replay {found}"
    case.misses = stats["misses"]
    return "equal"


def main() -> None:
    """Run all cases, print and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="write no result")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with hotset.load(reference.path(), memory="25%").hotset as handle:
        shape = handle.engine.controller.plan.shape
    cases = []
    for number in range(asked.count):
        case, rng = draw(
            asked.seed * 1_000_000 + number, shape.total_experts * (shape.expert_bytes or 0), shape.total_experts
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.safetensors"
            try:
                case.outcome = compare(case, *run_live(case, rng, path), path)
            except BudgetError as error:
                case.outcome = f"refused: {error}"
        cases.append(case)
        if case.outcome not in ("equal", "began warm, and says so"):
            print(case, flush=True)
    outcomes = Counter(case.outcome.partition(":")[0] for case in cases)
    print("  ".join(f"{name}: {number}" for name, number in outcomes.items()))
    good = sum(outcomes[name] for name in ("equal", "began warm, and says so", "refused"))
    if not asked.dry:
        versions = {each: version(each) for each in ("hotset", "torch", "transformers", "numba")}
        publish(
            "trust_replays",
            {"cases": len(cases), "seed": asked.seed, "outcomes": dict(outcomes), "versions": versions,
             "different": len(cases) - good, "runs": [asdict(case) for case in cases]},
        )  # fmt: skip
    sys.exit(good != len(cases))


if __name__ == "__main__":
    main()
