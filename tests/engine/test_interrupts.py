"""After an interrupt anywhere, and a second one while it is cleaned up, the next call works and computes stock's text.

Places are those where CPython delivers signals; a sample of them is tried here, all of them by
benchmarks/trust/interrupts.py.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "trust"))

from breakpoints import SUPPORTED, Breakpoints, Place  # noqa: E402
from examples import examples  # noqa: E402
from two_tiers import few_at_once  # noqa: E402
from two_tiers import load_two_tiers as load_on_device  # noqa: E402

import hotset  # noqa: E402
from hotset import reference  # noqa: E402
from hotset.cache.plan import Scope  # noqa: E402
from hotset.engine.arena import poison  # noqa: E402
from hotset.errors import HotsetError, StoreError  # noqa: E402
from hotset.shape import ExpertKey  # noqa: E402
from hotset.transfer import file as store_file  # noqa: E402
from hotset.transfer import reads  # noqa: E402
from hotset.transfer.readers import Jobs  # noqa: E402

PROMPTS = [torch.tensor([[5 + 97 * n, 900, 31 * n + 12, 7, 410 + n]]) for n in range(3)]


def greedy(model: Any, ids: Any, tokens: int = 3) -> Any:
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(reference.path(), dtype=torch.float32)
    return [greedy(stock, ids) for ids in PROMPTS]


@pytest.fixture(params=["cpu", "device"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "cpu":
        made = hotset.load(reference.path(), memory="12.5%", dtype=torch.float32, prefetch="gate", device="cpu")
        poison(made.hotset.engine.offload.arena)
    else:
        made = load_on_device(64, 3, 256, few_at_once, Scope.LAYER, 4)
    yield made
    made.hotset.close()


@pytest.fixture
def on_cpu() -> Iterator[Any]:
    made = hotset.load(reference.path(), memory="25%", dtype=torch.float32, prefetch="gate", device="cpu")
    poison(made.hotset.engine.offload.arena)
    yield made
    made.hotset.close()


def places_of(model: Any) -> list[tuple[Place, int]]:
    """Where a call can be interrupted, and how often it comes there; state that is not ours is left out."""
    greedy(model, PROMPTS[0], 2)
    with Breakpoints() as counted:
        greedy(model, PROMPTS[1], 2)
    kept = (
        "driver.py", "copies.py", "guard.py", "slots.py", "tiers.py", "prefetcher.py", "disk.py", "transfer.py",
        "readers.py", "controller.py",
    )  # fmt: skip
    return [(place, times) for place, times in counted.passed.items() if place.file in kept]


@pytest.mark.skipif(not SUPPORTED, reason="instructions are traced on Python 3.11")
def test_an_interrupt_anywhere_is_put_in_order_by_the_next_call(model: Any, expected: list[Any]) -> None:
    chance = random.Random(14)  # noqa: S311
    places = places_of(model)
    assert len(places) > 80
    struck = 0
    for number, (place, times) in enumerate(chance.sample(places, 8)):
        again = [chance.randrange(25) for _ in range(number % 3)]
        strike = Breakpoints((place, chance.randrange(times)), again)
        with suppress(KeyboardInterrupt), strike:
            greedy(model, PROMPTS[number % 3], 2)
        struck += bool(strike.struck)
        which = (number + 1) % 3
        assert torch.equal(greedy(model, PROMPTS[which]), expected[which]), strike.struck
    assert struck > 3


@pytest.mark.parametrize("before", [True, False])
def test_loads_that_were_boarded_and_never_queued_hold_nothing_up(
    before: bool, on_cpu: Any, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    add, calls = Jobs.add, []

    def interrupted(self: Jobs, jobs: Any, rank: Any) -> None:
        calls.append(rank)
        if not before:
            self._queues[rank].extend(jobs)  # queued, and no thread was told
        if len(calls) == 9:
            raise KeyboardInterrupt
        add(self, [] if not before else jobs, rank)
        for _ in jobs if not before else ():
            self._ready.put(None)

    monkeypatch.setattr(reads, "CANCEL_TIMEOUT_S", 1.0)
    monkeypatch.setattr(Jobs, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        greedy(on_cpu, PROMPTS[0])
    monkeypatch.setattr(Jobs, "add", add)
    assert torch.equal(greedy(on_cpu, PROMPTS[1]), expected[1])


@pytest.mark.skipif(not SUPPORTED, reason="instructions are traced on Python 3.11")
def test_a_pin_that_was_interrupted_leaves_no_slot_held(on_cpu: Any, expected: list[Any]) -> None:
    engine = on_cpu.hotset.engine
    keys = [ExpertKey(layer, expert) for layer in (0, 1) for expert in (3, 4)]
    with Breakpoints() as counted:
        engine.pin(keys[:1])
    engine.controller.unpin(keys[:1])
    chance = random.Random(3)  # noqa: S311
    for place, times in chance.sample(sorted(counted.passed.items(), key=str), 12):
        with suppress(KeyboardInterrupt), Breakpoints((place, chance.randrange(times)), [chance.randrange(20)]):
            engine.pin(keys)
        assert torch.equal(greedy(on_cpu, PROMPTS[2]), expected[2]), place
        engine.controller.unpin(keys)
        assert not engine.controller.residency.reserved
        assert not engine.controller.residency.changes


def test_a_burst_of_signals_leaves_the_model_usable(
    on_cpu: Any, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A signal in a weak reference's end is reported to pytest's hook, and the next one may strike within that.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    stop = threading.Event()

    def shoot() -> None:
        while not stop.wait(0.004):
            signal.raise_signal(signal.SIGINT)  # any thread may raise it: the main one handles it

    for number in range(5):
        stop.clear()
        thread = threading.Thread(target=shoot, daemon=True)
        with suppress(KeyboardInterrupt):
            thread.start()
            for _ in range(examples(20, 200)):
                with suppress(KeyboardInterrupt):
                    greedy(on_cpu, PROMPTS[0], 2)
        while thread.is_alive():
            with suppress(KeyboardInterrupt):
                stop.set()
                thread.join()
        with suppress(KeyboardInterrupt):  # the last one may not have been delivered yet
            threading.Event().wait(0.01)
        assert torch.equal(greedy(on_cpu, PROMPTS[number % 3]), expected[number % 3])


def test_a_call_from_within_an_event_is_refused_and_the_event_goes_on(on_cpu: Any, expected: list[Any]) -> None:
    engine, refused = on_cpu.hotset.engine, []

    def inside(*_: Any) -> None:
        try:
            greedy(on_cpu, PROMPTS[0])
        except HotsetError as error:
            refused.append(str(error))

    engine.stats.listen(inside)
    found = greedy(on_cpu, PROMPTS[1], 3)
    engine.stats.listen(None)
    assert refused
    assert "while it computes" in refused[0]
    assert torch.equal(found, expected[1])


def test_a_disk_that_hangs_is_said_so_and_the_model_works_once_it_answers(
    on_cpu: Any, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, hanging = threading.Event(), threading.Event()
    read = store_file._preadv

    def hang(handle: int, buffers: Any, offset: int) -> int:
        hanging.set()
        assert answered.wait(60)
        return read(handle, buffers, offset)

    def interrupted(_: Any) -> Any:
        assert hanging.wait(60)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(reads, "CANCEL_TIMEOUT_S", 0.2)
        patch.setattr("hotset.transfer.readers._HUNG_TIMEOUT_S", 0.2)
        patch.setattr(store_file, "_preadv", hang)
        patch.setattr(reads.ReadTransfer, "wait_any", interrupted)
        with pytest.raises(KeyboardInterrupt):
            greedy(on_cpu, PROMPTS[0])
        with pytest.raises(StoreError, match="does not answer"):
            greedy(on_cpu, PROMPTS[0])
    answered.set()
    assert torch.equal(greedy(on_cpu, PROMPTS[1]), expected[1])
