"""Threads that share a model, at random: texts, statistics, requests and recordings must be those of the runs alone.

    python benchmarks/trust/threads.py --count 200 --seed 1

Every round lets two to four threads answer prompts of the reference model on one model of a random setting, in some of
them one thread is broken off in the middle of a step. A last part measures what sharing costs: four prompts of four
workloads one after the other, in four threads, and as one batch.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoTokenizer
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
import hotset
from hotset import Phase, Trace, reference

from common import publish

SETTINGS = {
    "memory": ["12.5%", "25%", "50%"],
    "policy": ["blend", "lru", "eam", "slru"],
    "scope": ["layer", "pool"],
    "prefetch": ["off", "auto", "gate"],
}
DOMAINS = ("it", "c", "en_prose", "de")
ROUNDS_OF_A_MODEL = 8
LONG = 64


class BrokenOffError(Exception):
    """Stands for whatever ends a step in its middle."""


class Alone(NamedTuple):
    """What a prompt does when nothing else runs."""

    text: list[int]
    trace: Trace


def load(**options: Any) -> Any:
    """The reference model under a budget."""
    return hotset.load(reference.path(), device="cpu", dtype=torch.float32, **options)


def answer(model: Any, ids: list[int], new: int) -> list[int]:
    """The text of a prompt, of so many new tokens."""
    given = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    text: list[int] = model.generate(**given, **options)[0].tolist()
    return text


def prompts_of(tokenizer: Any, most: int) -> dict[str, list[list[int]]]:
    """The tokens of the reference prompts, by workload."""
    found = {}
    for name in DOMAINS:
        texts = [prompt.text for prompt in reference.workload(name).prompts][:most]
        found[name] = [tokenizer(text)["input_ids"][:24] for text in texts]
    return found


class Rounds:
    """Rounds at random, each compared with its prompts alone."""

    def __init__(self, prompts: dict[str, list[list[int]]], seed: int) -> None:
        self.prompts = [ids for some in prompts.values() for ids in some]
        self.random = random.Random(seed)  # noqa: S311 - of rounds, not of secrets
        self.plain = load(memory="50%", prefetch="off")
        self.known: dict[tuple[int, int], Alone] = {}
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    def alone(self, prompt: int, new: int) -> Alone:
        """What a prompt does alone; computed once."""
        key = prompt, new
        if key not in self.known:
            with self.plain.hotset.trace() as recorder:
                text = answer(self.plain, self.prompts[prompt], new)
            self.known[key] = Alone(text, recorder.finish())
        return self.known[key]

    def run(self, count: int) -> None:
        """So many rounds, a few on each model."""
        for first in range(0, count, ROUNDS_OF_A_MODEL):
            setting = {name: self.random.choice(choices) for name, choices in SETTINGS.items()}
            model = load(**setting)
            with model.hotset:
                for number in range(first, min(first + ROUNDS_OF_A_MODEL, count)):
                    fault = self.round(model)
                    self.counts["rounds"] += 1
                    if fault is not None:
                        self.faults.append(f"round {number}, {setting}: {fault}")
                        print(self.faults[-1], flush=True)

    def round(self, model: Any) -> str | None:
        """One round; returns what was wrong with it."""
        handle = model.hotset
        threads, new = self.random.choice([2, 3, 4]), self.random.randint(2, 8)
        chosen = self.random.sample(range(len(self.prompts)), threads)
        broken = self.random.randrange(threads) if self.random.random() < 0.3 else None
        expected = [self.alone(prompt, new) for prompt in chosen]
        handle.reset_stats()
        before = {request.number for request in handle.requests()}
        texts: dict[int, list[int]] = {}
        with handle.trace() as recorder, self.breaking(model, broken):
            at_once([self.work(model, number, chosen, new, texts) for number in range(threads)])
        self.counts["threads"] += threads
        self.counts["broken off"] += broken is not None
        whole = [number for number in range(threads) if number != broken]
        requests = [request for request in handle.requests() if request.number not in before]
        return compare(
            [texts.get(number, []) for number in whole],
            [expected[number] for number in whole],
            [self.prompts[chosen[number]] for number in whole],
            recorder.finish(),
            handle.stats(),
            requests,
        )

    def work(
        self, model: Any, number: int, chosen: list[int], new: int, texts: dict[int, list[int]]
    ) -> Callable[[], None]:
        """What one thread does; its name says which it is."""

        def run() -> None:
            threading.current_thread().name = f"thread {number}"
            with suppress(BrokenOffError):
                texts[number] = answer(model, self.prompts[chosen[number]], new)

        return run

    def breaking(self, model: Any, thread: int | None) -> Any:
        """Break one thread off at a random layer of its first step."""

        def fail(*_: Any) -> None:
            if threading.current_thread().name == f"thread {thread}":
                raise BrokenOffError

        layers = model.model.layers
        return layers[self.random.randrange(len(layers))].register_forward_pre_hook(fail)


def at_once(work: Sequence[Callable[[], Any]]) -> None:
    """Run all in threads of their own, which begin together."""
    begin = threading.Barrier(len(work))

    def run(one: Callable[[], Any]) -> None:
        begin.wait()
        one()

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def compare(
    texts: list[list[int]],
    expected: list[Alone],
    prompts: list[list[int]],
    trace: Trace,
    stats: dict[str, Any],
    requests: list[Any],
) -> str | None:
    """What differs from the runs alone, in words; None if nothing does."""
    traces = [each.trace for each in expected]
    totals = {phase: sum(one.count(phase) for one in traces) for phase in Phase}
    if texts != [each.text for each in expected]:
        return "a text differs"
    if any(stats[phase.name.lower()]["pass_tokens"] != total for phase, total in totals.items()):
        return "tokens of a phase differ"
    if stats["hits"] + stats["misses"] != stats["asked"] or stats["passes"] != sum(one.steps for one in traces):
        return "counters do not add up"
    if (trace.requests, trace.steps) != (len(traces), sum(one.steps for one in traces)) or (trace.experts < 0).any():
        return "the recording has holes, or other steps"
    for prompt, one in zip(prompts, traces, strict=True):
        if not any(_same(trace, np.flatnonzero(trace.request == request), one) for request in range(trace.requests)):
            return f"the recording of a prompt of {len(prompt)} tokens differs"
    sums = {name: sum(request.counters.as_dict()[name] for request in requests) for name in ("hits", "misses")}
    if sums != {name: stats[name] for name in sums}:
        return "requests do not add up to the whole"
    if sum(request.loaded_bytes for request in requests) != stats["loaded_bytes"]:
        return "bytes of requests do not add up to the whole"
    mine = sorted(request.tokens.tolist() for request in requests)
    if any([one.count(phase) for phase in Phase] not in mine for one in traces):
        return "a request has other tokens"
    return None


def _same(trace: Trace, rows: Any, one: Trace) -> bool:
    return len(rows) == one.tokens and all(
        np.array_equal(getattr(trace, name)[rows], getattr(one, name)) for name in ("experts", "weights", "phase")
    )


def sharing(prompts: dict[str, list[list[int]]]) -> dict[str, Any]:
    """What four prompts cost one after the other, in four threads and as a batch, at 25 %."""
    chosen = [some[0][:8] for some in prompts.values()]
    found = {}
    for way in ("one after the other", "four threads", "a batch of four"):
        model = load(memory="25%", prefetch="off")
        with model.hotset as handle:
            if way == "four threads":
                at_once([partial(answer, model, ids, LONG) for ids in chosen])
            elif way == "a batch of four":
                ids = torch.tensor([ids[: min(map(len, chosen))] for ids in chosen])
                options = {"max_new_tokens": LONG, "min_new_tokens": LONG, "do_sample": False, "pad_token_id": 0}
                model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            else:
                for ids in chosen:
                    answer(model, ids, LONG)
            decode = handle.stats()["decode"]
        tokens = decode["pass_tokens"]
        found[way] = {"hit_rate": decode["hit_rate"], "loads_per_token": decode["misses"] / tokens, "tokens": tokens}
        print(f"{way:>20}: hit rate {100 * found[way]['hit_rate']:.1f} %, {found[way]['loads_per_token']:.1f} loads")
    return found


def main() -> None:
    """Run the rounds, then measure what sharing costs, and publish both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    prompts = prompts_of(AutoTokenizer.from_pretrained(reference.path()), 6)
    rounds = Rounds(prompts, chosen.seed)
    rounds.run(chosen.count)
    figures = {"seed": chosen.seed, "counts": dict(rounds.counts), "wrong": len(rounds.faults), "faults": rounds.faults}
    print(figures)
    versions = {name: version(name) for name in ("torch", "transformers")}
    publish("trust_threads", figures | {"versions": versions, "sharing": sharing(prompts)})
    sys.exit(bool(rounds.faults))


if __name__ == "__main__":
    main()
