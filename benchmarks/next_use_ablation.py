"""What each part of `nextuse` is worth: the product's code, with one part taken out at a time.

``python benchmarks/next_use_ablation.py``; needs the public gpt-oss-20b trace, of which every fifth request is
replayed. Each variant is a copy of the policy's files in which a line or two are changed, loaded as a user's policy
would be. Share of the gap from lru to the optimum that is closed, decode, cold start, in percent. That trace has no
prompts, so what they teach is told by 14 domains of the reference model, one after the other.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

import hotset.policies
from hotset import reference
from hotset.plugins import resolve
from hotset.policies import Admit, parse
from hotset.sim import Sweep, simulate
from hotset.trace import Trace
from hotset.trace.combine import concat

from common import gpt_oss, publish

BUDGETS = ("12.5%", "25%", "50%")
EVERY = 5
"""One request in so many is replayed."""

Gaps = dict[str, list[float | None]]
Changes = dict[str, dict[str, str]]
_ROWS = "ROW_RATE, ROW_BOOST, ROW_SLOWS = 0.01, 4.0,"
VARIANTS: dict[str, Changes] = {
    "next pass only (discount 0)": {"nextuse": {"return root / (1.0 + root)": "return 0.0 * root"}},
    "a fixed discount of 0.7": {"nextuse": {"return root / (1.0 + root)": "return 0.7 + 0.0 * root"}},
    "without weights of experts and signature": {"nextuse": {_ROWS: _ROWS.replace("0.01", "0.0")}},
    "without the signature's weights": {"nextuse": {"% length] % SIGNATURES": "% length] * 0"}},
    "turns as passes of its own": {"nextuse": {"state.gap[stream] if event.phase == 1 else 1.0": "1.0"}},
    "rows learn at one pace": {"nextuse": {_ROWS: _ROWS.replace("4.0", "0.0")}},
    "without recall": {"_use_features": {"if found[which] > 0:": "if found[which] > 0 and False:"}},
    "without transitions": {
        "_use_features": {
            "            mean[e] += probability": "            mean[e] += 0.0 * probability",
            "            lift[e] += (": "            lift[e] += 0.0 * (",
        }
    },
    "a rate of 0.05": {"nextuse": {"\nRATE = 0.01": "\nRATE = 0.05"}},
    "weights begin at 0": {"nextuse": {"shared=np.array(START)": "shared=np.zeros(FEATURES)"}},
}
PROMPTS: dict[str, Changes] = {
    "the last 16 tokens of a prompt one by one": {"_streams": {"\nPROMPT_TOKENS = 64": "\nPROMPT_TOKENS = 16"}},
    "the last 256 tokens of a prompt one by one": {"_streams": {"\nPROMPT_TOKENS = 64": "\nPROMPT_TOKENS = 256"}},
    "prompts count in the rates only": {"_streams": {"\nPROMPT_TOKENS = 64": "\nPROMPT_TOKENS = 0"}},
    "prompts teach nothing": {
        "_streams": {"\nPROMPT_TOKENS = 64": "\nPROMPT_TOKENS = 0"},
        "nextuse": {
            "    common_rates(state, event)\n": "    if event.phase == 1:\n        common_rates(state, event)\n",
            "    age_rates(state, stream, layer, tokens)\n": "",
        },
    },
}
OPTIONS = {
    "without late": "nextuse:admit=score",
    "always admitting": "nextuse:admit=always",
    "all requests as one stream": "nextuse:streams=1",
    "depth 1": "nextuse:depth=1",
    "depth 2": "nextuse:depth=2",
    "depth 4": "nextuse:depth=4",
    "depth 16": "nextuse:depth=16",
}
FILES = ("nextuse", "_use_features", "_streams", "_regression")


def variant(number: int, changes: Changes, folder: Path) -> str:
    """Write a copy of the policy with its changes; return the path of the file that is the policy."""
    source = Path(hotset.policies.__file__).parent
    for name in FILES:
        text = (source / f"{name}.py").read_text()
        for other in FILES:
            text = text.replace(f"hotset.policies.{other}", f"variant{number}_{other}")
        for before, after in changes.get(name, {}).items():
            if text.count(before) != 1:
                sys.exit(f"{name}.py has {text.count(before)} of {before!r}: mend VARIANTS")
            text = text.replace(before, after)
        text = text.replace('name="nextuse"', f'name="variant{number}"')
        (folder / f"variant{number}_{name}.py").write_text(text)
    return str(folder / f"variant{number}_nextuse.py")


def some_requests(trace: Trace) -> Trace:
    """Every fifth request."""
    return trace.take(np.flatnonzero(trace.request % EVERY == 0))


def gaps(trace: Trace, specs: dict[str, str], streams: int, prefill: Admit = Admit.FREE) -> Gaps:
    """The share of the gap that each closes at each budget, in percent."""
    sweep = Sweep(policies=tuple(specs.values()), budgets=BUDGETS, streams=streams, fit=0, prefill=prefill)
    rows = simulate({"trace": trace}, sweep).rows
    found: Gaps = {name: [] for name in specs}
    names = {parse(resolve(spec)).spec: name for name, spec in specs.items()}
    for row in rows:
        name = names.get(row.policy)
        if name is not None and row.start == "cold" and row.phase == "decode":
            found[name].append(None if row.gap_closed is None else round(100 * row.gap_closed, 1))
    return found


def taught_by_prompts(folder: Path) -> dict[str, Gaps]:
    """What prompts teach, and what it is worth to let them evict."""
    trace = concat([reference.trace(name) for name in reference.DOMAINS])
    specs = {"nextuse": "nextuse", "blend": "blend"}
    specs |= {name: variant(100 + at, changes, folder) for at, (name, changes) in enumerate(PROMPTS.items())}
    found = {f"{streams} streams": gaps(trace, specs, streams) for streams in (1, 4)}
    plain = {name: name for name in ("nextuse", "blend")}
    for prefill in (Admit.SCORE, Admit.ALWAYS):
        found[f"1 streams, prompts admit by {prefill.name.lower()}"] = gaps(trace, plain, 1, prefill)
    for setting, rows in found.items():
        for name, row in rows.items():
            print(f"{setting}  {name:<42}", *row, flush=True)
    return found


def main() -> None:
    """Measure, print and publish."""
    public = gpt_oss()
    if public is None:
        sys.exit("the public gpt-oss-20b trace is missing: docs/guide/traces.md says where it can be had")
    trace, table = some_requests(public), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sys.path.insert(0, str(folder))
        specs = {"nextuse": "nextuse", "blend": "blend", **OPTIONS}
        specs |= {name: variant(at, changes, folder) for at, (name, changes) in enumerate(VARIANTS.items())}
        for streams in (1, 4):
            table[f"{streams} streams"] = gaps(trace, specs, streams)
            for name, row in table[f"{streams} streams"].items():
                print(f"{streams} streams  {name:<42}", *row, flush=True)
        prompts = taught_by_prompts(folder)
    publish(
        "next_use_ablation",
        {
            "unit": "share of the gap from lru to the optimum in percent, at 12.5, 25 and 50 %",
            "requests": trace.requests,
            "gap_closed": table,
            "prompts": prompts,
        },
    )


if __name__ == "__main__":
    main()
