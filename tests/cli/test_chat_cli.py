"""`hotset chat` through a pipe, on the model that ships with hotset."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hotset import reference
from hotset.cli.app import app
from hotset.errors import HotsetError

pytestmark = pytest.mark.filterwarnings("default")

SHORT = ("--memory", "25%", "--max-new-tokens", "10")


def talk(text: str, *words: str | Path) -> Any:
    done = CliRunner().invoke(app, ["chat", *SHORT, *map(str, words)], input=text)
    if isinstance(done.exception, HotsetError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done


def test_two_turns_through_a_pipe_say_what_stock_transformers_says() -> None:
    turns = json.loads(talk("Il mercato del\n\nE poi?\n", "--json").stdout)["turns"]
    tokenizer = AutoTokenizer.from_pretrained(reference.path())
    stock = AutoModelForCausalLM.from_pretrained(reference.path(), dtype="auto")
    messages: list[dict[str, str]] = []
    assert [turn["prompt"] for turn in turns] == ["Il mercato del", "E poi?"]
    for turn in turns:
        messages.append({"role": "user", "content": turn["prompt"]})
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]
        assert turn["prompt_tokens"] == ids.shape[1]
        out = stock.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
        assert turn["text"] == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": turn["text"]})
    assert turns[1]["reused_tokens"] > 0


def test_a_block_keeps_its_indentation_and_a_line_does_not() -> None:
    turns = json.loads(talk('"""    if x:\n        return y\n"""\n   Il mercato  \n', "--json").stdout)["turns"]
    assert [turn["prompt"] for turn in turns] == ["    if x:\n        return y", "Il mercato"]


def test_a_question_mark_asks_for_help() -> None:
    assert talk("/?\n/bye\n").stdout.startswith("/stats:")


def test_text_goes_to_stdout_and_the_cost_to_stderr() -> None:
    done = talk("Il mercato del\n")
    assert ">" not in done.stdout
    assert "of experts in memory" in done.stderr


def test_commands() -> None:
    done = talk("/help\nIl mercato\n/STATS\n/nonsense\n/Bye now\nnever asked\n")
    lines = done.stdout.splitlines()
    assert not any(line.startswith("there is no /bye") for line in lines)
    assert lines[0].startswith("/stats:")
    assert sum("of experts in memory" in line for line in lines) == 1
    assert any(line.startswith("there is no /nonsense") for line in lines)


def test_three_quotes_hold_lines_together_in_a_pipe() -> None:
    turns = json.loads(talk('"""Il mercato\n/stats\n\ndel paese\n"""\nE poi?\n', "--json").stdout)["turns"]
    assert [turn["prompt"] for turn in turns] == ["Il mercato\n/stats\n\ndel paese", "E poi?"]
    with pytest.raises(HotsetError, match='block that line 2 of stdin opens has no end: close it with """'):
        talk('uno\n"""due\ntre\n')


def test_reset_forgets() -> None:
    turns = json.loads(talk("Il mercato\n/reset\nIl mercato\n", "--json").stdout)["turns"]
    assert turns[0]["text"] == turns[1]["text"]
    assert turns[1]["reused_tokens"] == 0


def test_json_has_turns_and_stats() -> None:
    document = json.loads(talk("uno\n/stats\ndue\n", "--json").stdout)
    assert len(document["turns"]) == 2
    assert document["stats"]["decode"]["pass_tokens"] == 18
    assert {"hit_rate", "resident_bytes", "policy", "memory"} <= document.keys()


def test_nothing_said_is_nothing_answered() -> None:
    assert json.loads(talk("", "--json").stdout)["turns"] == []


def test_ctrl_c_in_a_pipe_leaves_with_130() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "hotset", "chat", "--memory", "25%", "--max-new-tokens", "3000"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("Il mercato\nnever answered\n")
    process.stdin.flush()
    assert os.read(process.stdout.fileno(), 4)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
