"""Reads that go wrong, at random: each call computes stock's text or raises hotset's own error; the next one is right.

    python benchmarks/trust/read_faults.py --count 500 --seed 1

Kinds: `error` (a system error, passing or lasting), `short` (fewer bytes than asked for), `zero` (no bytes at all),
`delayed` (one read takes long), and on a pack, which has digests, `flipped` (one bit comes over wrong) and `blank`
(a page comes over as zeros), once or again and again. An unpacked checkpoint has nothing to find the last two by.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1])]

import hotset  # noqa: E402
from hotset import reference  # noqa: E402
from hotset.engine.arena import poison  # noqa: E402
from hotset.errors import HotsetError  # noqa: E402
from hotset.transfer import file as store_file  # noqa: E402

from common import publish  # noqa: E402

TRIES_PER_MODEL = 50
NEW_TOKENS = 3
HANGS_S = 60.0
PAGE = 4096
PROMPTS = ("La storia di", "int main(void) {", "The sea was", "Die Katze", "def f(x):", "El perro")
Read = Callable[[int, Any, int], int]


def main() -> None:
    """Let reads fail, count what comes of it, and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="faults of each kind")
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    store_file.RETRY_PAUSE_S = 0.001
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(random.Random(wanted.seed), Path(folder))  # noqa: S311
        for kind in KINDS:
            bench.run(kind, wanted.count)
            print(f"{kind:8} {dict(bench.counts[kind])}", flush=True)
    publish(
        "trust_read_faults",
        {
            "seed": wanted.seed, "torch": version("torch"), "transformers": version("transformers"),
            "kinds": {kind: dict(counts) for kind, counts in bench.counts.items()},
            "wrong_texts_hangs_or_tracebacks": len(bench.failures), "failures": bench.failures,
            "slowest_call_s": round(bench.slowest_s, 2), "seconds": round(time.monotonic() - began),
        },
    )  # fmt: skip
    sys.exit(bool(bench.failures))


class Bench:
    """Stock's texts, a model on an unpacked or packed checkpoint, and what came of faults."""

    def __init__(self, chance: random.Random, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from hotset.models.packing import pack

        self.chance = chance
        self.packed = folder / "packed"
        pack(str(reference.path()), self.packed, dtype="float32")
        stock = AutoModelForCausalLM.from_pretrained(reference.path(), dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(reference.path())
        self.prompts = [tokenizer(text, return_tensors="pt").input_ids for text in PROMPTS]
        self.expected = [generate(stock, ids) for ids in self.prompts]
        self.model: Any = None
        self.counts: dict[str, Counter[str]] = {}
        self.failures: list[dict[str, Any]] = []
        self.slowest_s = 0.0

    def load(self, packed: bool) -> None:
        """Another model, at random settings."""
        if self.model is not None:
            self.model.hotset.close()
        self.settings = {
            "memory": self.chance.choice(["12.5%", "25%", "50%"]),
            "policy": self.chance.choice(["lru", "blend"]),
            "scope": self.chance.choice(["layer", "pool"]),
            "prefetch": self.chance.choice(["auto", "gate", "off"]),
        }
        place = self.packed if packed else reference.path()
        self.model = hotset.load(place, dtype=torch.float32, device="cpu", **self.settings)
        poison(self.model.hotset.engine.offload.arena)

    def run(self, kind: str, count: int) -> None:
        """So many faults of one kind; those that no read came to do not count."""
        counts = self.counts[kind] = Counter()
        tries = 0
        while counts["faults"] < count:
            if tries % TRIES_PER_MODEL == 0:
                self.load(packed=kind in ON_PACKS)
            tries += 1
            fault = KINDS[kind](self.chance)
            store_file._preadv = fault
            try:
                outcome = self.ask(kind, may_fail=True)
            finally:
                store_file._preadv = os.preadv
            if not fault.struck:
                continue
            counts["faults"] += 1
            counts[outcome] += 1
            self.ask(kind, may_fail=False)

    def ask(self, kind: str, *, may_fail: bool) -> str:
        """Ask for a text; a refusal counts as right while reads fail."""
        number = self.chance.randrange(len(self.prompts))
        began, outcome, told = time.monotonic(), "right text", ""
        try:
            if not torch.equal(generate(self.model, self.prompts[number]), self.expected[number]):
                outcome = "wrong text"
        except HotsetError as error:
            outcome, told = "refused", str(error)
        except Exception as error:
            outcome, told = "traceback", repr(error)
        took_s = time.monotonic() - began
        self.slowest_s = max(self.slowest_s, took_s)
        if outcome in ("wrong text", "traceback") or (outcome == "refused" and not may_fail) or took_s > HANGS_S:
            fault = {"kind": kind, "outcome": outcome, "told": told, "took_s": took_s, "settings": self.settings}
            self.failures.append(fault | {"next_call": not may_fail})
            print(self.failures[-1], flush=True)
        return outcome


def generate(model: Any, ids: Any) -> Any:
    """Greedy tokens."""
    mask = torch.ones_like(ids)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )


class Fault:
    """Reads as usual until a random one, then wrong for one, some or all reads that follow."""

    def __init__(self, chance: random.Random, wrong: Read, most_reads: int = 120) -> None:
        self.struck = 0
        self._left = chance.randrange(most_reads)
        self._times = chance.choice([1, 1, 2, 5, 10**9])
        self._wrong = wrong

    def __call__(self, handle: int, buffers: Any, offset: int) -> int:
        """Read, or do wrong."""
        self._left -= 1
        if self._left >= 0 or self.struck >= self._times:
            return os.preadv(handle, buffers, offset)
        self.struck += 1
        return self._wrong(handle, buffers, offset)


def error(chance: random.Random) -> Fault:
    """A system error."""
    code = chance.choice([errno.EIO, errno.EAGAIN, errno.EBADF, errno.ETIMEDOUT, errno.ENOMEM, errno.ESTALE])

    def wrong(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    return Fault(chance, wrong)


def short(chance: random.Random) -> Fault:
    """Fewer bytes than asked for, and nonsense behind them."""

    def wrong(handle: int, buffers: Any, offset: int) -> int:
        got = os.preadv(handle, buffers, offset)
        cut = chance.randrange(1, got) if got > 1 else got
        buffers[0][cut:] = b"\x7f" * (len(buffers[0]) - cut)
        return cut

    return Fault(chance, wrong)


def zero(chance: random.Random) -> Fault:
    """No bytes at all, as at the end of a file."""
    return Fault(chance, lambda *_: 0)


def delayed(chance: random.Random) -> Fault:
    """A read that takes long."""

    def wrong(handle: int, buffers: Any, offset: int) -> int:
        time.sleep(chance.uniform(0.02, 0.25))
        return os.preadv(handle, buffers, offset)

    fault = Fault(chance, wrong)
    fault._times = min(fault._times, 3)
    return fault


def flipped(chance: random.Random) -> Fault:
    """One bit comes over wrong."""

    def wrong(handle: int, buffers: Any, offset: int) -> int:
        got = os.preadv(handle, buffers, offset)
        buffers[0][chance.randrange(got)] ^= 1 << chance.randrange(8)
        return got

    return Fault(chance, wrong)


def blank(chance: random.Random) -> Fault:
    """A page comes over as zeros."""

    def wrong(handle: int, buffers: Any, offset: int) -> int:
        got = os.preadv(handle, buffers, offset)
        first = chance.randrange(max(got // PAGE, 1)) * PAGE
        size = min(PAGE, got - first)
        buffers[0][first : first + size] = bytes(size)
        return got

    return Fault(chance, wrong)


KINDS = {"error": error, "short": short, "zero": zero, "delayed": delayed, "flipped": flipped, "blank": blank}
ON_PACKS = ("flipped", "blank")


if __name__ == "__main__":
    main()
