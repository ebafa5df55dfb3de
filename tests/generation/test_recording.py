"""Prompts that are recorded: every token of them and of their answers has a row, and nothing else has one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotset import Trace
from hotset.generation import LabelledPrompt, Sampling, Stop, TextModel, record_prompts, recording
from hotset.generation.checkpoints import Checkpoints
from hotset.options import RunOptions

pytestmark = pytest.mark.filterwarnings("default")

PROMPTS = [LabelledPrompt("Il mercato del", {"domain": "it"}), LabelledPrompt("int main(void)\n{", {"domain": "c"})]


def test_prompts_are_recorded_with_checkpoints_and_stopped_by_the_caller(tmp_path: Path) -> None:
    checkpoints, stop, done = Checkpoints(tmp_path / "t.safetensors", every_s=0), Stop(), []
    with TextModel.load(RunOptions(memory="25%")) as text_model:
        sampling = Sampling(max_new_tokens=4)
        whole = record_prompts(text_model, PROMPTS, sampling, batch=2, checkpoints=checkpoints, use_template=False)
        alone = record_prompts(
            text_model, PROMPTS, sampling, stop=stop, on_prompt=lambda: (done.append(1), stop.ask()), use_template=False
        )
        none = record_prompts(text_model, PROMPTS, sampling, stop=stop, use_template=False)
    assert whole is not None
    assert alone is not None
    assert none is None
    assert [label["domain"] for label in whole.labels] == ["it", "c"]
    assert Trace.load(checkpoints.path).requests == 2
    assert (alone.requests, len(done)) == (1, 1)
    np.testing.assert_array_equal(alone.token_ids, whole.token_ids[whole.request == 0])  # type: ignore[index]


def test_a_padded_batch_whose_prompt_takes_several_steps_leaves_rows_for_its_tokens_alone() -> None:
    mask = np.array([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    out = np.array([[5, 6, 7, 8, 9, 11, 12, 13], [0, 0, 7, 8, 9, 11, 2, 0]])
    whole = recording._real_rows([10, 2, 2], mask, out, {2})
    chunks = recording._real_rows([6, 4, 2, 2], mask, out, {2})
    assert whole.tolist() == [True] * 5 + [False] * 2 + [True] * 3 + [True, True] + [True, False]
    assert chunks.tolist() == [True] * 3 + [False] * 2 + [True] + [True] * 4 + [True, True] + [True, False]
