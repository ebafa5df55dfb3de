"""Machine code that numba keeps on disk goes by a name that changes with all source that is in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotset.forecasts import Forecast, _kernel, names, parse
from hotset.policies import eam
from hotset.policies.base import digest_of
from hotset.prefetch import trial
from hotset.sim import _prefetch_loop as loop
from hotset.sim import forecasting

LOOPS: dict[str, tuple[Callable[..., Any], ...]] = {
    "steps": _kernel._ENTRIES,
    "judging": forecasting._TEMPLATES,
    "predicting": loop.TEMPLATES,
}
MORE: dict[str, tuple[Path, ...]] = {
    "steps": (),
    "judging": forecasting.PREFETCH_SOURCES,
    "predicting": forecasting.PREFETCH_SOURCES,
}


def reached(functions: list[Any]) -> set[Path]:
    """The files of all functions that these call by name, and of those that they call, and so on."""
    done: set[Any] = set()
    waiting = [getattr(function, "py_func", function) for function in functions]
    while waiting:
        function = waiting.pop()
        done.add(function)
        named = [function.__globals__.get(name) for name in function.__code__.co_names]
        called = [getattr(one, "py_func", one) for one in named]
        waiting += [one for one in called if is_ours(one) and one not in done]
    return {Path(function.__code__.co_filename) for function in done}


def is_ours(thing: Any) -> bool:
    return hasattr(thing, "__code__") and "hotset" in thing.__code__.co_filename


def parts(forecast: type[Forecast], loop: str) -> list[Any]:
    return [*LOOPS[loop], forecast.observe, forecast.probabilities]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", names())
def test_every_function_that_is_reached_counts(name: str, loop: str) -> None:
    forecast = type(parse(name))
    assert reached(parts(forecast, loop)) <= {*_kernel.sources_of(forecast, LOOPS[loop]), *MORE[loop]}


def test_what_is_reached_is_more_than_one_file() -> None:
    files = reached(parts(type(parse("eam")), "predicting"))
    assert files >= {Path(module.__file__ or "") for module in (loop, forecasting, trial, eam)}


@pytest.mark.parametrize("module", [loop, forecasting, trial, eam, _kernel])
def test_the_name_changes_with_each_source(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [*_kernel.sources_of(type(parse("best")), loop.TEMPLATES), *MORE["predicting"]]
    before = digest_of(sources)
    assert digest_of(sources) == before
    read = Path.read_bytes

    def edited(path: Path) -> bytes:
        return read(path) + b"#" * (path == Path(module.__file__))

    monkeypatch.setattr(Path, "read_bytes", edited)
    assert digest_of(sources) != before
