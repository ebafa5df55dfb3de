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
from hotset.cli.conversation import Conversation
from hotset.cli.kept_cache import FixedCache, GrowingCache, cache_for
from hotset.cli.loading import loaded_model
from hotset.errors import HotsetError
from hotset.generation.sampling import Sampling
from hotset.options import RunOptions

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


def test_text_goes_to_stdout_and_the_cost_to_stderr() -> None:
    done = talk("Il mercato del\n")
    assert ">" not in done.stdout
    assert "of experts in memory" in done.stderr


def test_commands() -> None:
    done = talk("/help\nIl mercato\n/stats\n/nonsense\n/exit\nnever asked\n")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("/stats:")
    assert sum("of experts in memory" in line for line in lines) == 1
    assert any(line.startswith("there is no /nonsense") for line in lines)


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


def test_a_kept_cache_changes_nothing() -> None:
    with loaded_model(RunOptions(memory="25%")) as loaded:
        kept = Conversation(loaded, Sampling(max_new_tokens=6), use_template=False)
        for line in ("La funzione calcola", "Il comando apre", "Se l'area non contiene"):
            forgetful = Conversation(loaded, Sampling(max_new_tokens=6), use_template=False)
            forgetful.messages = list(kept.messages)
            answer = kept.say(line, lambda _: None)
            assert answer.new_ids == forgetful.say(line, lambda _: None).new_ids
        assert kept.reused_tokens > 10


def test_a_cache_of_fixed_size_says_the_same_and_grows_is_cut_and_is_emptied() -> None:
    pytest.importorskip("triton")
    # In bfloat16 the attention over a longer, masked cache rounds differently, and a near tie goes the other way.
    with loaded_model(RunOptions(memory="25%", dtype="float32")) as loaded:
        assert isinstance(cache_for(loaded.model), GrowingCache)
        loaded.model.hotset.static_caches.open()  # as where the device drives
        fixed = cache_for(loaded.model)
        assert isinstance(fixed, FixedCache)
        talks = [
            Conversation(loaded, Sampling(max_new_tokens=6), False, kept)
            for kept in (fixed, GrowingCache(loaded.model.config))
        ]
        caches, texts = [], []
        for line in ("La funzione calcola", "Il comando apre", "cut", "Se l'area " * 160, "reset", "Il mercato del"):
            for talk in talks:
                if line == "reset":
                    talk.reset()
                elif line == "cut":  # the history is another one from here
                    talk.messages[-1]["content"] = "di tutto"
            if line in ("reset", "cut"):
                continue
            answers = [talk.say(line, lambda _: None) for talk in talks]
            assert answers[0].new_ids == answers[1].new_ids
            assert answers[0].cached_ids == answers[1].cached_ids
            assert talks[0].reused_tokens == talks[1].reused_tokens
            caches.append(fixed._cache)
            texts.append(talks[0].reused_tokens)
        assert [reused > 0 for reused in texts] == [False, True, True, False]
        assert caches[0] is caches[1]
        assert caches[2] is caches[3]
        assert [cache.layers[0].max_cache_len for cache in caches[1:3]] == [512, 1024]


def test_a_fixed_cache_that_a_turn_has_left_half_full_is_emptied() -> None:
    pytest.importorskip("triton")
    with loaded_model(RunOptions(memory="25%")) as loaded:
        loaded.model.hotset.static_caches.open()  # as where the device drives
        fixed = cache_for(loaded.model)
        assert isinstance(fixed, FixedCache)
        talk = Conversation(loaded, Sampling(max_new_tokens=4), False, fixed)
        first = talk.say("Il mercato del", lambda _: None)
        fixed.lend([1, 2, 3], 4).layers[0].cumulative_length.fill_(2)  # and it never comes back
        talk.messages = []
        assert talk.say("Il mercato del", lambda _: None).new_ids == first.new_ids
        assert talk.reused_tokens == 0


def test_a_turn_that_does_not_fit_leaves_the_conversation_as_it_was() -> None:
    with loaded_model(RunOptions(memory="25%")) as loaded:
        conversation = Conversation(loaded, Sampling(max_new_tokens=4))
        with pytest.raises(HotsetError, match="context is 4,096"):
            conversation.say("x " * 5000, lambda _: None)
        assert conversation.messages == []
        assert len(conversation.say("Il mercato", lambda _: None).new_ids) == 4


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
