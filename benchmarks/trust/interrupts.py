"""Interrupts a model at random, in many ways, and asks it again: the next call must work, and say what stock says.

Models come at random budgets, policies, scopes and prefetch modes, on a normal and on a slow disk. `--places` tries
every place of an event where a signal can be delivered, one after the other, instead of random ones.

    python benchmarks/trust/interrupts.py --count 1000 --seed 1
    python benchmarks/trust/interrupts.py --places --seed 1
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from breakpoints import Breakpoints, Place  # noqa: E402

import hotset  # noqa: E402
from hotset import policies, reference  # noqa: E402
from hotset.engine.arena import poison  # noqa: E402
from hotset.errors import HotsetError  # noqa: E402
from hotset.transfer import file as store_file  # noqa: E402

from common import publish  # noqa: E402

TRIES_PER_MODEL = 25
NEW_TOKENS = 6
HANGS_S = 45.0
"""A call that takes longer has hung: it takes less than a second on a machine with nothing else to do."""
ARMED: list[bool] = []
"""Not empty while signals are to raise: what is delivered late must not strike the script."""
PROMPTS = ("La storia di", "int main(void) {", "The sea was", "Die Katze", "def f(x):", "Il était", "{", "El perro")


class DroppedError(Exception):
    """What a streamer, a hook or a clock raises."""


@dataclass
class Bench:
    """A model to interrupt, what stock says, and what came of it."""

    chance: random.Random
    prompts: list[Any]
    expected: list[Any]
    model: Any = None
    settings: dict[str, Any] = field(default_factory=dict)
    usual_s: float = 0.1
    raised: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, number: int, **more: Any) -> Any:
        """The tokens that the model makes of a prompt."""
        return generate(self.model, self.prompts[number], **more)


def generate(model: Any, ids: Any, **more: Any) -> Any:
    """Greedy tokens."""
    mask = torch.ones_like(ids)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
        pad_token_id=0, **more,
    )  # fmt: skip


def main() -> None:
    """Interrupt, ask again, compare, and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--places", action="store_true")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    bench = prepare(random.Random(wanted.seed))  # noqa: S311
    began = time.monotonic()
    tries = every_place(bench) if wanted.places else at_random(bench, wanted.count)
    rows = [(kind, count, bench.raised[kind]) for kind, count in sorted(tries.items())]
    for kind, count, raised in rows:
        print(f"{kind:14} {count:5} tries  {raised:5} raised")
    print(f"{sum(tries.values())} tries, {len(bench.failures)} failures; slowest next call {bench.slowest_s:.1f} s")
    publish(
        "trust_interrupt_places" if wanted.places else "trust_interrupts",
        {
            "seed": wanted.seed, "torch": version("torch"), "transformers": version("transformers"),
            "tries": tries.total(), "interrupts": bench.raised.total(),
            "wrong_texts_errors_or_hangs": len(bench.failures),
            "kinds": [{"kind": kind, "tries": count, "raised": raised} for kind, count, raised in rows],
            "slowest_next_call_s": round(bench.slowest_s, 2), "seconds": round(time.monotonic() - began),
            "failures": bench.failures,
        },
    )  # fmt: skip
    sys.exit(bool(bench.failures))


def prepare(chance: random.Random) -> Bench:
    """What stock says."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stock = AutoModelForCausalLM.from_pretrained(reference.path(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(reference.path())
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in PROMPTS]
    return Bench(chance, prompts, [generate(stock, ids) for ids in prompts])


def load(bench: Bench) -> None:
    """Another model, at random settings."""
    if bench.model is not None:
        bench.model.hotset.close()
    chance = bench.chance
    bench.settings = {
        "memory": chance.choice(["12.5%", "25%", "50%", "80 slots"]),
        "policy": chance.choice([name for name in policies.names() if name not in ("belady", "static")]),
        "scope": chance.choice(["layer", "pool"]),
        "prefetch": chance.choice(["auto", "gate", "transition", "off"]),
        "staging": chance.randrange(1, 9),
    }
    bench.model = hotset.load(reference.path(), dtype=torch.float32, device="cpu", **bench.settings)
    poison(bench.model.hotset.engine.offload.arena)
    bench.ask(0)
    began = time.monotonic()
    bench.ask(1)
    bench.usual_s = time.monotonic() - began


def at_random(bench: Bench, count: int) -> Counter[str]:
    """Random interrupts on random models, until so many have struck."""
    tries: Counter[str] = Counter()
    while (struck := bench.raised.total()) < count:  # a signal that came after the last token does not count
        if tries.total() % TRIES_PER_MODEL == 0:
            load(bench)
        kind = bench.chance.choice(list(KINDS))
        tries[kind] += 1
        with slow_disk() if bench.chance.random() < 0.3 else whole():
            attempt(bench, kind, lambda kind=kind: KINDS[kind](bench))
        if tries.total() % 25 == 0:
            print(f"{struck} of {tries.total()}: {len(bench.failures)} failures", flush=True)
    return tries


def every_place(bench: Bench) -> Counter[str]:
    """Each place of a call once, half of them with a second and a third interrupt soon after."""
    tries: Counter[str] = Counter()
    load(bench)
    with Breakpoints() as counted:
        bench.ask(2)
    for number, (place, times) in enumerate(sorted(counted.passed.items(), key=str)):
        at = place, bench.chance.randrange(times)
        again = [bench.chance.randrange(30) for _ in range(number % 4 // 2 * bench.chance.randrange(1, 3))]
        tries[place.file] += 1
        attempt(bench, place.file, lambda at=at, again=again: struck(bench, at, again))
    return tries


def attempt(bench: Bench, kind: str, interrupted: Callable[[], object]) -> None:
    """Interrupt a call, then ask again."""
    raised = False
    ARMED.append(True)
    try:
        interrupted()
    except (KeyboardInterrupt, DroppedError, HotsetError):
        ARMED.clear()
        raised = True
    ARMED.clear()
    signal.setitimer(signal.ITIMER_REAL, 0)
    bench.raised[kind] += raised
    number = bench.chance.randrange(len(bench.prompts))
    began, fault = time.monotonic(), None
    try:
        if not torch.equal(bench.ask(number), bench.expected[number]):
            fault = "wrong text"
    except Exception as error:
        fault = repr(error)[:200]
    took_s = time.monotonic() - began
    bench.slowest_s = max(bench.slowest_s, took_s)
    if fault or took_s > HANGS_S:
        bench.failures.append({"kind": kind, "fault": fault or f"{took_s:.0f} s", "settings": bench.settings})
        print(bench.failures[-1], flush=True)


def at_some_time(bench: Bench) -> float:
    """A moment of a call, in seconds from its beginning."""
    return max(bench.chance.random() * bench.usual_s, 1e-4)


def one_signal(bench: Bench, error: type[BaseException] = KeyboardInterrupt, every_s: float = 0.0) -> None:
    """A signal at a random time, or one every few milliseconds from then on."""

    def strike(*_: Any) -> None:
        if ARMED:
            raise error

    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, at_some_time(bench), every_s)
    bench.ask(bench.chance.randrange(len(bench.prompts)))


def burst(bench: Bench) -> None:
    """Signals one after the other, into the cleaning up, too."""
    one_signal(bench, every_s=bench.chance.uniform(0.0003, 0.01))


def ctrl_c(bench: Bench) -> None:
    """SIGINT, sent by another thread."""

    def strike(*_: Any) -> None:
        if ARMED:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, strike)
    timer = threading.Timer(at_some_time(bench), lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()
    try:
        bench.ask(bench.chance.randrange(len(bench.prompts)))
    finally:
        with suppress(KeyboardInterrupt):
            timer.cancel()
            timer.join()


def asynchronous(bench: Bench) -> None:
    """An exception set in the thread that generates, as some servers and notebooks do."""
    started, outcome = threading.Event(), list[BaseException]()

    def work() -> None:
        started.set()
        try:
            bench.ask(bench.chance.randrange(len(bench.prompts)))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    time.sleep(at_some_time(bench))
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt))
    thread.join()
    if outcome:
        raise KeyboardInterrupt


def streamer(bench: Bench) -> None:
    """A streamer that fails, as when a client goes."""

    class Stream:
        left = bench.chance.randrange(NEW_TOKENS)

        def put(self, _: Any) -> None:
            self.left -= 1
            if self.left < 0:
                raise DroppedError

        def end(self) -> None:
            """Nothing."""

    bench.ask(bench.chance.randrange(len(bench.prompts)), streamer=Stream())


def hook(bench: Bench) -> None:
    """A hook on some module that fails."""
    left = [bench.chance.randrange(NEW_TOKENS)]

    def fail(*_: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise DroppedError

    modules = [module for name, module in bench.model.named_modules() if name.count(".") >= 2]
    handle = bench.chance.choice(modules).register_forward_hook(fail)
    try:
        bench.ask(bench.chance.randrange(len(bench.prompts)))
    finally:
        handle.remove()


def place(bench: Bench) -> None:
    """One of the places where a signal can be delivered, and perhaps a second one soon after."""
    again = [bench.chance.randrange(60) for _ in range(bench.chance.randrange(3))]
    struck(bench, bench.chance.randrange(20_000), again)


def struck(bench: Bench, at: tuple[Place, int] | int, again: list[int]) -> None:
    """A call that is interrupted at a place."""
    with Breakpoints(at, again):
        bench.ask(bench.chance.randrange(len(bench.prompts)))


def read_fault(bench: Bench) -> None:
    """Reads that fail for a while."""
    left = [bench.chance.randrange(200)]

    def fail(handle: int, buffers: Any, offset: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return os.preadv(handle, buffers, offset)

    with reading_by(fail):
        bench.ask(bench.chance.randrange(len(bench.prompts)))


KINDS: dict[str, Callable[[Bench], None]] = {
    "signal": one_signal,
    "burst": burst,
    "ctrl-c": ctrl_c,
    "timeout": lambda bench: one_signal(bench, DroppedError),
    "asynchronous": asynchronous,
    "streamer": streamer,
    "hook": hook,
    "place": place,
    "read fault": read_fault,
}


@contextmanager
def reading_by(read: Callable[..., int]) -> Iterator[None]:
    """Have files read in another way; an interrupt in here leaves it, which `main` sees to."""
    before, store_file._preadv = store_file._preadv, read  # type: ignore[assignment]
    try:
        yield
    finally:
        store_file._preadv = before


def slow_disk() -> Any:
    """Reads that take a few milliseconds each."""

    def slow(handle: int, buffers: Any, offset: int) -> int:
        time.sleep(0.002)
        return os.preadv(handle, buffers, offset)

    return reading_by(slow)


def whole() -> Any:
    """The disk as it is."""
    return reading_by(os.preadv)


if __name__ == "__main__":
    main()
