"""Threads that share a model: each event is served under its own step, so what is counted is that of the runs alone."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hotset  # noqa: E402
from hotset import Phase, Trace, policies, reference  # noqa: E402
from hotset.cache.controller import Controller  # noqa: E402
from hotset.cache.plan import SlotPlan  # noqa: E402
from hotset.engine.build import gpu_engine  # noqa: E402
from hotset.models.budget import shape_of  # noqa: E402
from hotset.models.connect import connect_engine  # noqa: E402
from hotset.models.deferred import DeferredExperts, load_without_experts  # noqa: E402

LAYERS, NEW, TIMEOUT_S = 8, 6, 120.0
PROMPTS = [list(range(first, first + length)) for first, length in ((100, 5), (900, 8), (1700, 9), (2500, 11))]
TOKENS = sum(map(len, PROMPTS))


class Alone(NamedTuple):
    """What one prompt does when nothing else runs."""

    text: list[int]
    trace: Trace
    uses: Any
    asked: dict[Phase, int]


def on_cpu(**options: Any) -> Any:
    return hotset.load(
        reference.path(), **({"memory": "25%", "device": "cpu", "dtype": torch.float32, "prefetch": "off"} | options)
    )


def host_driven() -> Any:
    """The engine of a GPU that the host drives, on the CPU."""
    from transformers import AutoModelForCausalLM

    deferred = DeferredExperts(keep=lambda *_: False)
    with load_without_experts(deferred):
        model = AutoModelForCausalLM.from_pretrained(reference.path(), dtype=torch.float32)
    assert deferred.moe_layers is not None
    assert deferred.catalog is not None
    shape = shape_of(deferred.moe_layers, deferred.catalog)
    host = SlotPlan(shape, 200, staging=8)
    controller = Controller(SlotPlan(shape, 128, staging=4), policies.parse("blend"))
    specs = [moe_layer.spec for moe_layer in deferred.moe_layers]
    engine = gpu_engine(controller, deferred.catalog, specs, torch.device("cpu"), host, policies.parse("lru"))
    connect_engine(model, deferred.moe_layers, engine)
    return model


def answer(model: Any, prompt: list[int], new: int = NEW) -> list[int]:
    given = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    text: list[int] = model.generate(**given, **options)[0].tolist()
    return text


@pytest.fixture(scope="module")
def alone() -> list[Alone]:
    torch.set_num_threads(1)
    model, found = on_cpu(), []
    for prompt in PROMPTS:
        model.hotset.reset_stats()
        with model.hotset.trace() as recorder:
            text = answer(model, prompt)
        stats = model.hotset.stats()
        asked = {phase: stats[phase.name.lower()]["hits"] + stats[phase.name.lower()]["misses"] for phase in Phase}
        found.append(Alone(text, recorder.finish(), model.hotset.requests()[-1].uses, asked))
    model.hotset.close()
    return found


def at_once(*work: Callable[[], None]) -> None:
    """Run all in threads of their own; what one raises is raised here."""
    errors: list[BaseException] = []

    def run(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


@contextmanager
def in_lockstep(model: Any, threads: int) -> Iterator[None]:
    """Let no thread begin a layer before all have come to it: their steps are all under way at every event."""
    barrier = threading.Barrier(threads, timeout=TIMEOUT_S)

    def wait(*_: Any) -> None:
        barrier.wait()

    hooks = [layer.register_forward_pre_hook(wait) for layer in model.model.layers]
    yield
    for hook in hooks:
        hook.remove()


def rows_of(trace: Trace, prompt: list[int]) -> Any:
    """The rows of the request that begins with a prompt, in their order."""
    assert trace.token_ids is not None
    for request in range(trace.requests):
        rows = np.flatnonzero(trace.request == request)
        if trace.token_ids[rows][: len(prompt)].tolist() == prompt:
            return rows
    raise AssertionError("the recording has no such request")


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("make", [on_cpu, host_driven])
def test_threads_count_and_record_as_the_runs_alone(
    make: Callable[[], Any], threads: int, alone: list[Alone], tmp_path: Path
) -> None:
    model, texts = make(), {}
    prompts = PROMPTS[:threads]

    def work(number: int) -> Callable[[], None]:
        return lambda: texts.update({number: answer(model, prompts[number])})

    with model.hotset.trace(tmp_path / "merged.safetensors"), in_lockstep(model, threads):
        at_once(*(work(number) for number in range(threads)))
    stats, requests, statistics = model.hotset.stats(), model.hotset.requests(), model.hotset.statistics()
    model.hotset.close()

    assert [texts[number] for number in range(threads)] == [each.text for each in alone[:threads]]
    assert stats["passes"] == threads * NEW
    assert stats["prefill"]["pass_tokens"] == sum(map(len, prompts))
    assert stats["decode"]["pass_tokens"] == threads * (NEW - 1)
    assert stats["hits"] + stats["misses"] == stats["asked"]
    for phase in Phase:
        counts = stats[phase.name.lower()]
        assert counts["hits"] + counts["misses"] == sum(each.asked[phase] for each in alone[:threads])
    assert np.array_equal(statistics.uses, sum(each.uses for each in alone[:threads]))

    assert [request.number for request in requests] == list(range(threads))
    assert sorted(int(request.tokens[Phase.PREFILL]) for request in requests) == sorted(map(len, prompts))
    for each, prompt in zip(alone, prompts, strict=False):
        (mine,) = (request for request in requests if request.tokens[Phase.PREFILL] == len(prompt))
        assert mine.tokens[Phase.DECODE] == NEW - 1
        assert np.array_equal(mine.uses, each.uses)
    assert sum(request.counters.as_dict()["hits"] for request in requests) == stats["hits"]
    assert sum(request.counters.as_dict()["misses"] for request in requests) == stats["misses"]
    assert sum(request.loaded_bytes for request in requests) == stats["loaded_bytes"]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = Trace.load(tmp_path / "merged.safetensors")
        replayed = Controller(SlotPlan(trace.shape, 128), policies.parse("blend")).replay(trace.events()).counters
    assert (trace.requests, trace.steps) == (threads, threads * NEW)
    assert trace.count(Phase.PREFILL) == sum(map(len, prompts))
    assert (trace.experts >= 0).all()
    for each, prompt in zip(alone, prompts, strict=False):
        rows = rows_of(trace, prompt)
        assert np.array_equal(trace.experts[rows], each.trace.experts)
        assert np.array_equal(trace.weights[rows], each.trace.weights)
        assert np.array_equal(trace.phase[rows], each.trace.phase)
        assert np.array_equal(trace.token_ids[rows], each.trace.token_ids)
        assert (np.diff(trace.step[rows]) >= 0).all()
    total = replayed.as_dict()
    assert total["hits"] + total["misses"] == stats["asked"]


def test_four_prompts_are_33_tokens_and_four_requests_without_a_barrier(alone: list[Alone]) -> None:
    model = on_cpu(prefetch="auto")
    at_once(*(lambda prompt=prompt: answer(model, prompt) for prompt in PROMPTS))  # type: ignore[misc]
    stats, requests = model.hotset.stats(), model.hotset.requests()
    model.hotset.close()
    assert stats["prefill"]["pass_tokens"] == TOKENS == 33
    assert len(requests) == 4
    assert stats["asked"] == sum(sum(each.asked.values()) for each in alone)


def test_where_all_experts_fit_threads_are_recorded_each_for_itself(alone: list[Alone]) -> None:
    model = on_cpu(memory="100%")
    assert model.hotset.engine.offload is None
    with model.hotset.trace() as recorder, in_lockstep(model, 2):
        at_once(lambda: answer(model, PROMPTS[0]) and None, lambda: answer(model, PROMPTS[1]) and None)
    trace, requests = recorder.finish(), model.hotset.requests()
    model.hotset.close()
    assert (trace.experts >= 0).all()
    for each, prompt in zip(alone, PROMPTS[:2], strict=False):
        assert np.array_equal(trace.experts[rows_of(trace, prompt)], each.trace.experts)
    assert sorted(int(request.tokens.sum()) for request in requests) == [5 + NEW - 1, 8 + NEW - 1]


@contextmanager
def stopped_at(model: Any, layer: int, thread: threading.Thread) -> Iterator[threading.Event]:
    """Hold a thread at a layer until the block ends; the event says that it has come there."""
    come, go_on = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        if threading.current_thread() is thread:
            come.set()
            assert go_on.wait(TIMEOUT_S)

    hook = model.model.layers[layer].register_forward_pre_hook(hold)
    yield come
    go_on.set()
    thread.join(TIMEOUT_S)
    hook.remove()


def test_a_recording_holds_no_step_that_had_begun_before_it(alone: list[Alone]) -> None:
    model = on_cpu()
    thread = threading.Thread(target=lambda: model(torch.tensor([PROMPTS[3]])), daemon=True)
    recorder = None
    with stopped_at(model, 3, thread) as come:
        thread.start()
        assert come.wait(TIMEOUT_S)
        recorder = model.hotset.trace()
        answer(model, PROMPTS[0])
    recorder.stop()
    trace = recorder.finish()
    model.hotset.close()
    assert np.array_equal(trace.experts, alone[0].trace.experts)


def test_a_recording_that_ends_first_leaves_a_step_out_that_goes_on(alone: list[Alone]) -> None:
    model = on_cpu()
    recorder = model.hotset.trace()
    thread = threading.Thread(target=lambda: model(torch.tensor([PROMPTS[3]])), daemon=True)
    with stopped_at(model, 3, thread) as come:
        thread.start()
        assert come.wait(TIMEOUT_S)
        answer(model, PROMPTS[0])
        recorder.stop()
    trace, stats = recorder.finish(), model.hotset.stats()
    model.hotset.close()
    assert np.array_equal(trace.experts, alone[0].trace.experts)
    assert stats["prefill"]["pass_tokens"] == 5 + 11


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])  # torch calls hooks after the second only
def test_a_step_broken_off_in_one_thread_leaves_no_trace_in_another(
    error: type[BaseException], alone: list[Alone]
) -> None:
    model = on_cpu()

    def broken() -> None:
        def fail(*_: Any) -> None:
            if threading.current_thread() is threads[0]:
                raise error

        hook = model.model.layers[3].register_forward_pre_hook(fail)
        with pytest.raises(error):
            answer(model, PROMPTS[3])
        hook.remove()
        answer(model, PROMPTS[1])

    threads = [threading.Thread(target=broken), threading.Thread(target=lambda: answer(model, PROMPTS[0]))]
    with model.hotset.trace() as recorder:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
    trace, stats, requests = recorder.finish(), model.hotset.stats(), model.hotset.requests()
    model.hotset.close()
    assert (trace.requests, trace.steps) == (2, 2 * NEW)
    for number in (0, 1):
        assert np.array_equal(trace.experts[rows_of(trace, PROMPTS[number])], alone[number].trace.experts)
    assert stats["passes"] == 2 * NEW
    assert stats["prefill"]["pass_tokens"] == 5 + 8
    assert sum(request.counters.as_dict()["hits"] for request in requests) == stats["hits"]
    assert sum(request.loaded_bytes for request in requests) == stats["loaded_bytes"]


def test_a_request_follows_its_cache_from_thread_to_thread() -> None:
    from transformers import DynamicCache

    model = on_cpu()
    caches = [DynamicCache(config=model.config) for _ in range(2)]

    def step(number: int, tokens: list[int]) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                model(input_ids=torch.tensor([tokens]), past_key_values=caches[number], use_cache=True)

        return run

    for tokens in ([5, 9, 31], [7], [8]):
        for number in range(2):
            at_once(step(number, tokens))
    found = [request.as_dict() for request in model.hotset.requests()]
    model.hotset.close()
    assert [(each["prefill_tokens"], each["decode_tokens"]) for each in found] == [(3, 2), (3, 2)]


def test_what_is_called_outside_of_a_step_is_counted_for_no_request() -> None:
    model = on_cpu()
    mlp, hidden = model.model.layers[2].mlp, torch.zeros(1, 3, model.config.hidden_size)
    with model.hotset.trace() as recorder, torch.no_grad():
        mlp(hidden)
        model(torch.tensor([PROMPTS[0]]))
        mlp(hidden)
    stats, requests = model.hotset.stats(), model.hotset.requests()
    model.hotset.close()
    assert stats["prefill"]["events"] == LAYERS + 2
    assert [int(request.counters.as_dict()["events"]) for request in requests] == [LAYERS]
    assert recorder.finish().tokens == 5
