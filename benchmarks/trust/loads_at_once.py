"""Loads of several threads at once, some refused: every model right, and transformers as it was after each round.

    python benchmarks/trust/loads_at_once.py --count 12 --seed 1

Rounds of two and of four threads, `--count` of each: a thread loads the reference model under a budget and computes
logits, or asks for a budget that is refused, at random. After each round a plain load must be stock, and what
transformers patches of itself must be what it was.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
import hotset
from hotset import reference
from hotset.errors import BudgetError

from common import publish

IDS = torch.arange(3, 20)[None]
NAMES = ("_load_pretrained_model", "tie_weights", "init_weights")


def state() -> list[Any]:
    """What a load may change of transformers and torch."""
    return [*(vars(PreTrainedModel)[name] for name in NAMES), torch.get_default_dtype()]


@torch.no_grad()
def plain() -> torch.Tensor:
    """Stock's logits."""
    model = AutoModelForCausalLM.from_pretrained(reference.path(), dtype=torch.float32).eval()
    logits: torch.Tensor = model(IDS).logits
    return logits


@torch.no_grad()
def load(memory: str) -> torch.Tensor | None:
    """The logits of a model under a budget, or nothing where it is refused."""
    try:
        model = hotset.load(str(reference.path()), memory=memory, device="cpu", dtype=torch.float32)
    except BudgetError:
        return None
    with model.hotset:
        logits: torch.Tensor = model(IDS).logits
    return logits


def at_once(memories: list[str]) -> list[torch.Tensor | None]:
    """One thread for each budget, begun together."""
    start = threading.Barrier(len(memories))

    def begin(work: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        start.wait()
        return work()

    with ThreadPoolExecutor(len(memories)) as pool:
        return list(pool.map(begin, [partial(load, memory) for memory in memories]))


def run(count: int, seed: int) -> dict[str, int]:
    """All rounds, and how often each thing happened."""
    dice = random.Random(seed)  # noqa: S311 - of rounds, not of secrets
    counts: Counter[str] = Counter({"wrong logits": 0, "transformers changed": 0, "plain load wrong": 0})
    before, expected = state(), plain()
    for threads in (2, 4):
        for _ in range(count):
            memories = [dice.choice(["25%", "50%", "1 slots"]) for _ in range(threads)]
            found = [logits for logits in at_once(memories) if logits is not None]
            counts["rounds"] += 1
            counts["loads"] += len(found)
            counts["refused"] += threads - len(found)
            counts["wrong logits"] += sum(not torch.allclose(logits, expected, atol=1e-3) for logits in found)
            counts["transformers changed"] += any(a is not b for a, b in zip(state(), before, strict=True))
            counts["plain load wrong"] += not torch.equal(plain(), expected)
    return dict(counts)


def main() -> None:
    """Run the rounds, print the counts and write them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    counts = run(given.count, given.seed)
    for name, number in counts.items():
        print(f"{name:24} {number:6,}")
    versions = {name: version(name) for name in ("torch", "transformers")}
    publish("trust_loads_at_once", {"seed": given.seed, "versions": versions, "counts": counts})
    sys.exit(any(counts[name] for name in ("wrong logits", "transformers changed", "plain load wrong")))


if __name__ == "__main__":
    main()
