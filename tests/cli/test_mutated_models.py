"""A sample of benchmarks/trust/model_files.py: mutated files of a model's folder end well, or in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from examples import examples

TRUST = Path(__file__).parents[2] / "benchmarks" / "trust"
SEED, CASES = 2014, examples(16, 40)
QUANTISED = {"fp8": 12, "gguf": 12, "gptq": 6, "awq": 6, "nvfp4": 6, "mxfp4": 6}
QUANTISED_CASES = {kind: examples(max(3, cases // 3), cases) for kind, cases in QUANTISED.items()}

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not TRUST.is_dir(), reason="needs the benchmarks beside the tests"),
]


@pytest.fixture(scope="module")
def fuzz() -> Iterator[Any]:
    sys.path.insert(0, str(TRUST))
    try:
        import model_files

        yield model_files
    finally:
        sys.path.remove(str(TRUST))


def test_mutated_files_of_a_model_end_well_or_in_one_line(fuzz: Any, tmp_path: Path) -> None:
    base = fuzz.base_folder(tmp_path / "base")
    codes = []
    for case in range(CASES):
        with fuzz.case_folder(base, SEED, case) as (place, name, command):
            words = [command, fuzz.place_of(place), *fuzz.COMMANDS[command]]
            code, out, err = fuzz.call(words, tmp_path)
        assert fuzz.judge(code, out, err) is None, (case, name, command, err)
        codes.append(code)
    assert set(codes) == {0, 2}
    assert fuzz.call(["run", str(base), *fuzz.COMMANDS["run"]], tmp_path)[0] == 0


@pytest.mark.parametrize("kind", QUANTISED_CASES)
def test_mutated_quantised_models_end_well_or_in_one_line(fuzz: Any, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    base = fuzz.quantised_folder(tmp_path / "base", kind)
    assert fuzz.call(["run", fuzz.place_of(base), *fuzz.COMMANDS["run"]], tmp_path)[0] == 0
    codes = []
    for case in range(QUANTISED_CASES[kind]):
        with fuzz.case_folder(base, SEED, case) as (place, name, command):
            assert (place / name).read_bytes() != (base / name).read_bytes()
            code, out, err = fuzz.call([command, fuzz.place_of(place), *fuzz.COMMANDS[command]], tmp_path)
        assert fuzz.judge(code, out, err) is None, (case, name, command, err)
        codes.append(code)
    assert 2 in codes
