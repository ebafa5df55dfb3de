"""A limit for the whole process becomes a budget for experts, or is refused with one that works."""

from __future__ import annotations

import re

import pytest

from hotset.errors import BudgetError, HotsetError
from hotset.generation.process_memory import within_process_memory
from hotset.generation.text_model import TextModel, locate
from hotset.options import RunOptions

pytestmark = pytest.mark.filterwarnings("default")


def derived(mib: int, **more: object) -> RunOptions:
    options = RunOptions(process_memory=f"{mib}MiB", device="cpu", **more)  # type: ignore[arg-type]
    return within_process_memory(options, locate(None))


def test_the_refusal_names_a_limit_that_works_and_more_buys_more() -> None:
    within_process_memory(RunOptions(), locate(None))  # without one nothing is done
    with pytest.raises(BudgetError) as caught:
        derived(100)
    least = int(re.search(r"pass --process-memory (\d+)MiB", str(caught.value))[1])  # type: ignore[index]
    assert derived(least + 100).memory != "auto"  # what this process holds changes from call to call
    assert derived(least + 2000).memory == "100%"  # with room for the pieces while it is loaded
    with TextModel.load(RunOptions(process_memory=f"{least + 2000}MiB", device="cpu")) as text_model:
        assert text_model.stats()["engine"] == "stock"


def test_it_excludes_a_budget_of_experts() -> None:
    with pytest.raises(HotsetError, match="exclude each other"):
        derived(4000, memory="25%")
    with pytest.raises(BudgetError, match="cannot read the size"):
        RunOptions(process_memory="much")
