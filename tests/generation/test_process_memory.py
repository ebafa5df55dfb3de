"""A limit for the whole process becomes a budget for experts, or is refused with one that works."""

from __future__ import annotations

import re

import pytest

from hotset.errors import BudgetError, HotsetError
from hotset.generation import process_memory
from hotset.generation.process_memory import within_process_memory
from hotset.generation.text_model import TextModel, locate
from hotset.options import RunOptions
from hotset.shape import format_size

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def _held(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process holds changes from call to call, by more than the experts of the reference model."""
    held = process_memory.resident_bytes()
    monkeypatch.setattr(process_memory, "resident_bytes", lambda: held)


def derived(mib: int, **more: object) -> RunOptions:
    options = RunOptions(process_memory=f"{mib}MiB", device="cpu", **more)  # type: ignore[arg-type]
    return within_process_memory(options, locate(None))[0]


def test_the_refusal_names_a_limit_that_works_and_more_buys_more() -> None:
    assert within_process_memory(RunOptions(), locate(None)) == (RunOptions(), [])  # without one nothing is done
    with pytest.raises(BudgetError) as caught:
        derived(100)
    least = int(re.search(r"pass --process-memory (\d+)MiB", str(caught.value))[1])  # type: ignore[index]
    assert derived(least + 10).memory.endswith("B")
    assert derived(least + 2000).memory == "100%"  # with room for the pieces while it is loaded
    with TextModel.load(RunOptions(process_memory=f"{least + 2000}MiB", device="cpu")) as text_model:
        assert text_model.stats()["engine"] == "stock"
        (line,) = text_model.notes
        assert "which leaves room for all 24.0 MiB of them" in line


def test_a_line_says_the_limit_what_is_taken_and_what_is_left() -> None:
    with pytest.raises(BudgetError) as caught:
        derived(100)
    limit = int(re.search(r"pass --process-memory (\d+)MiB", str(caught.value))[1]) + 10  # type: ignore[index]
    options, (line,) = within_process_memory(RunOptions(process_memory=f"{limit}MiB", device="cpu"), locate(None))
    budget = format_size(int(str(options.memory).removesuffix("B")))
    assert line.startswith(f"--process-memory {limit}MiB: the process takes ")
    assert line.endswith(f"beside the experts, which leaves {budget} for them, of 24.0 MiB in all")


def test_it_excludes_a_budget_of_experts() -> None:
    with pytest.raises(HotsetError, match="exclude each other"):
        derived(4000, memory="25%")
    with pytest.raises(BudgetError, match="cannot read the size"):
        RunOptions(process_memory="much")
