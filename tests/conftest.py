"""Without a GPU, kernels are tested in Triton's interpreter: it has to be asked for before anybody imports Triton."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from examples import LONG

from hotset import plugins

# What has started the tests may ignore signals, as nohup and scripts do, and the commands that tests start would, too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

with suppress(ImportError):  # then the tests that draw examples are left out
    from hypothesis import HealthCheck, settings

    # The same examples every time, so that a change is judged by what it changed; `make test-long` draws new ones.
    # A busy machine is slow: neither a test nor the drawing of its examples fails by the clock.
    _settings = {"derandomize": not LONG, "deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("hotset", **_settings)
    settings.load_profile("hotset")

with suppress(ImportError):  # then whatever needs torch is left out
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"

    @pytest.fixture(autouse=True)
    def one_thread() -> None:
        """Tests run in several processes, one thread of torch in each."""
        torch.set_num_threads(1)


SLOW = (Path(__file__).parent / "slow.txt").read_text().split()
"""Files that take longest: they are begun first, so that no process is left alone with one at the end."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the slow files first, if several processes share the tests; the others stay in their order."""
    if hasattr(config, "workerinput"):
        turns = {config.rootpath / name: turn for turn, name in enumerate(SLOW)}
        items.sort(key=lambda item: turns.get(item.path, len(SLOW)))


@pytest.fixture(autouse=True)
def policies_of_one_test() -> Iterator[None]:
    """What a test defines in files is unknown to the next: a comparison of all policies would take it in."""
    known = {kind: dict(found) for kind, found in plugins._files.items()}
    yield
    for kind, found in plugins._files.items():
        found.clear()
        found.update(known[kind])


@pytest.fixture(scope="session")
def stock() -> Any:
    """The reference model as transformers loads it, in float32; tests only compute with it."""
    from transformers import AutoModelForCausalLM

    from hotset import reference

    return AutoModelForCausalLM.from_pretrained(reference.path(), dtype=torch.float32)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The tokenizer of the reference model."""
    from transformers import AutoTokenizer

    from hotset import reference

    return AutoTokenizer.from_pretrained(reference.path())
