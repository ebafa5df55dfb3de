"""Loads of several threads at the same time: each gets its model, and transformers is as it was afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import hotset
from hotset.errors import BudgetError
from hotset.models.deferred import DeferredExperts, load_without_experts

ROUNDS = 3
NAMES = ("_load_pretrained_model", "tie_weights", "init_weights", "from_pretrained")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny.save("qwen3_moe", folder)
    return folder


def globals_of_transformers() -> list[Any]:
    return [vars(PreTrainedModel)[name] for name in NAMES] + [torch.get_default_dtype()]


def plain(saved: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(saved).eval()
    return tiny.logits(model, tiny.inputs("", model))


def loaded(saved: Path) -> torch.Tensor:
    model = hotset.load(str(saved), memory="50%", device="cpu")
    found = tiny.logits(model, tiny.inputs("", model))
    model.hotset.close()
    return found


def refused(saved: Path) -> torch.Tensor:
    with pytest.raises(BudgetError):
        hotset.load(str(saved), memory="1 slots", device="cpu")
    return torch.empty(0)


@pytest.mark.parametrize("threads", [2, 4])
def test_loads_at_once_leave_transformers_as_it_was(threads: int, saved: Path) -> None:
    with tiny.quiet():
        before, expected = globals_of_transformers(), plain(saved)
        for turn in range(ROUNDS):
            start = threading.Barrier(threads)

            def at_once(work: Callable[[Path], torch.Tensor], start: threading.Barrier = start) -> torch.Tensor:
                start.wait()
                return work(saved)

            works = [refused if (turn + n) % 3 == 1 else loaded for n in range(threads)]
            with ThreadPoolExecutor(threads) as pool:
                results = list(pool.map(at_once, works))
            assert all(not len(found) or torch.allclose(found, expected, atol=1e-4) for found in results)
            assert all(now is then for now, then in zip(globals_of_transformers(), before, strict=True))
            assert torch.equal(plain(saved), expected)


class Waiting:
    """A class to load with that first lets another thread load the same model without hotset."""

    expected: torch.Tensor | None = None

    @classmethod
    def from_pretrained(cls, folder: str, **options: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            cls.expected = pool.submit(plain, Path(folder)).result()
        return AutoModelForCausalLM.from_pretrained(folder, **options)


def test_a_plain_load_of_another_thread_during_a_load_is_not_affected(saved: Path) -> None:
    with tiny.quiet():
        model = hotset.load(str(saved), memory="50%", device="cpu", auto_class=Waiting)
        assert Waiting.expected is not None
        assert torch.equal(Waiting.expected, plain(saved))
        assert torch.allclose(tiny.logits(model, tiny.inputs("", model)), Waiting.expected, atol=1e-4)
    model.hotset.close()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, RuntimeError])
def test_a_load_that_is_broken_off_leaves_nothing_behind(error: type[BaseException], saved: Path) -> None:
    def break_off(*_: Any) -> bool:
        raise error("enough")

    before = globals_of_transformers()
    with tiny.quiet(), pytest.raises(error, match="enough"), load_without_experts(DeferredExperts(keep=break_off)):
        AutoModelForCausalLM.from_pretrained(saved)
    assert all(now is then for now, then in zip(globals_of_transformers(), before, strict=True))
    with tiny.quiet():
        assert len(plain(saved))
