"""`generate` answers as transformers does, ends where the caller says, and tells why it ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from transformers import AutoModelForCausalLM

import hotset.generation
from hotset import reference
from hotset.compiling import compile_seconds
from hotset.errors import HotsetError, ModelError
from hotset.generation import Finish, Sampling, Stop, TextModel, encode_plain, encode_prompt, generate
from hotset.options import RunOptions

pytestmark = pytest.mark.filterwarnings("default")

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "generation.md"
PROMPT = "Il mercato del"


@pytest.fixture(scope="module")
def text_model() -> Iterator[TextModel]:
    with TextModel.load(RunOptions(memory="25%")) as found:
        yield found


def test_the_answer_is_that_of_stock_transformers(text_model: TextModel) -> None:
    stock: Any = AutoModelForCausalLM.from_pretrained(reference.path(), dtype="auto")
    ids, pieces = encode_plain(text_model, PROMPT), []
    answer = generate(text_model, ids, Sampling(max_new_tokens=12), pieces.append)
    out = stock.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert answer.new_ids == out[0, ids.shape[1] :].tolist()
    assert "".join(pieces) == answer.text
    assert (answer.finish, answer.prompt_tokens, answer.cached_ids) == (Finish.LENGTH, ids.shape[1], [])
    assert answer.prefill_s
    assert answer.tokens_per_s


def test_the_caller_stops_an_answer_between_two_tokens_and_a_prompt_between_two_layers(text_model: TextModel) -> None:
    ids, stop = encode_plain(text_model, PROMPT), Stop()
    whole = generate(text_model, ids, Sampling(max_new_tokens=20))
    some = generate(text_model, ids, Sampling(max_new_tokens=20), lambda _: stop.ask(), stop=stop)
    assert 0 < len(some.new_ids) < 20
    assert some.new_ids == whole.new_ids[: len(some.new_ids)]
    none = generate(text_model, ids, stop=stop)
    assert (none.finish, none.new_ids, none.text, none.prefill_s) == (Finish.INTERRUPT, [], "", None)
    assert generate(text_model, ids, Sampling(max_new_tokens=20)).new_ids == whole.new_ids


def test_what_is_compiled_in_between_is_not_counted_as_speed(text_model: TextModel) -> None:
    ids, fresh = encode_plain(text_model, PROMPT), []

    def compile_something(_: str) -> None:
        if len(fresh) < 2:  # once for the first token, once later
            fresh.append(numba.njit(lambda x: x + 1))
            fresh[-1](1)

    before_s, began_s = compile_seconds(), time.perf_counter()
    answer = generate(text_model, ids, Sampling(max_new_tokens=12), compile_something)
    wall_s, compiled_s = time.perf_counter() - began_s, compile_seconds() - before_s
    assert compiled_s > 0
    assert 0 < (answer.prefill_s or 0) + answer.decode_s <= wall_s - compiled_s


def test_finish_is_written_as_a_word() -> None:
    assert [f"{finish}" for finish in Finish] == ["stop", "length", "interrupt"]


def test_a_prompt_that_cannot_be_answered_is_refused(text_model: TextModel) -> None:
    with pytest.raises(HotsetError, match="has no tokens"):
        encode_plain(text_model, "")
    with pytest.raises(HotsetError, match="not UTF-8"):
        encode_prompt(text_model, "\ud800")
    with pytest.raises(HotsetError, match="context is 4,096"):
        generate(text_model, encode_plain(text_model, "x " * 5000))


def test_a_load_ends_where_the_caller_says() -> None:
    class EnoughError(Exception):
        pass

    def check() -> None:
        raise EnoughError

    with pytest.raises(EnoughError):
        TextModel.load(RunOptions(), check)
    with pytest.raises(ModelError, match="there is no folder"):
        TextModel.load(RunOptions(model="./nowhere"))


def test_every_public_name_resolves() -> None:
    for name in hotset.generation.__all__:
        assert getattr(hotset.generation, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        hotset.generation.nonsense  # noqa: B018


def test_the_snippet_of_the_page_runs(tmp_path: Path) -> None:
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "hit rate" in done.stdout
    assert (tmp_path / "it.safetensors").exists()
