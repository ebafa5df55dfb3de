"""The model's authors decide how tokens are chosen, options change it, and the answer says what was used."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from calls import call, model_folder

from hotset import reference
from hotset.generation import Conversation, Sampling, TextModel, encode_messages, encode_prompt, generate
from hotset.options import OptionError, RunOptions

pytestmark = pytest.mark.filterwarnings("default")

AUTHORS = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
SHORT = ("-p", "Il mercato del", "--memory", "25%", "--max-new-tokens", "8")


def used(authors: dict[str, Any], **asked: Any) -> dict[str, Any]:
    return Sampling(**asked).within(SimpleNamespace(**authors)).as_dict()


def test_the_authors_decide_and_options_change_it() -> None:
    known = {"greedy": False, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "repetition_penalty": 1.0}
    assert used(AUTHORS, seed=3) == known | {"by_model": True, "seed": 3}
    assert used(AUTHORS, seed=3, top_k=0) == known | {"by_model": False, "seed": 3, "top_k": 0}
    assert used(AUTHORS, min_p=0.1)["min_p"] == 0.1
    assert used({"do_sample": True})["top_k"] == 50  # as transformers has it
    assert used({}, top_p=0.9) == known | {
        "by_model": False, "temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("authors", "asked", "by_model"),
    [
        ({}, {}, True),
        ({"do_sample": False, "temperature": 0.7}, {}, True),
        ({"do_sample": True, "temperature": 0}, {}, True),
        (AUTHORS, {"greedy": True}, False),
        (AUTHORS, {"greedy": True, "temperature": 1.0, "top_p": 0.5}, False),  # of a file of options
        (AUTHORS, {"temperature": 0}, False),
        ({}, {"seed": 4}, True),
    ],
)
def test_greedy(authors: dict[str, Any], asked: dict[str, Any], by_model: bool) -> None:
    found = Sampling(**asked).within(SimpleNamespace(**authors))
    assert (found.greedy, found.by_model, found.seed, found.words()) == (True, by_model, None, "greedy")


def test_it_is_said_in_words() -> None:
    words = Sampling(seed=5, repetition_penalty=1.1, min_p=0.05).within(SimpleNamespace(**AUTHORS)).words()
    assert words == "temperature 0.6, top-p 0.95, top-k 20, min-p 0.05, repetition penalty 1.1, seed 5"
    assert Sampling(greedy=True, repetition_penalty=2).within(SimpleNamespace()).words() == (
        "greedy, repetition penalty 2"
    )


def test_the_line_and_the_json_say_what_was_used_and_the_seed_repeats_it(tmp_path: Path) -> None:
    place = model_folder(tmp_path / "model", generation_config=AUTHORS | {"temperature": 1.8})
    drawn = json.loads(call("run", place, *SHORT, "--json").out)
    seed = drawn["sampling"]["seed"]
    assert drawn["sampling"] == {
        "greedy": False, "by_model": True, "temperature": 1.8, "top_p": 0.95, "top_k": 20, "min_p": None,
        "repetition_penalty": 1.0, "seed": seed,
    }  # fmt: skip
    again = call("run", place, *SHORT, "--seed", str(seed))
    assert again.out.rstrip("\n") == drawn["text"].rstrip("\n")
    assert f"; temperature 1.8, top-p 0.95, top-k 20, seed {seed};" in again.err
    other = json.loads(call("run", place, *SHORT, "--seed", str(seed + 1), "--json").out)
    assert other["new_token_ids"] != drawn["new_token_ids"]
    stock = json.loads(call("run", *SHORT, "--json").out)
    greedy = json.loads(call("run", place, *SHORT, "--greedy", "--json").out)
    assert greedy["new_token_ids"] == stock["new_token_ids"]
    assert stock["sampling"]["greedy"]  # the model that ships with hotset
    assert stock["sampling"]["by_model"]


def test_every_setting_reaches_the_draw() -> None:
    """A set of one token is greedy whatever the temperature; a penalty that forbids repeats leaves none."""
    with TextModel.load(RunOptions(memory="25%", dtype="float32")) as text_model:
        ids = encode_prompt(text_model, "Il mercato del")
        likeliest = generate(text_model, ids, Sampling(max_new_tokens=8)).new_ids
        for narrow in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
            sampling = Sampling(max_new_tokens=8, temperature=2.0, seed=1, **narrow)
            assert generate(text_model, ids, sampling).new_ids == likeliest, narrow
        wide = Sampling(max_new_tokens=8, temperature=50.0, top_k=0, seed=1)
        assert generate(text_model, ids, wide).new_ids != likeliest
        never = generate(text_model, ids, Sampling(max_new_tokens=20, repetition_penalty=100.0)).new_ids
        assert len(set(never)) == len(never)


def test_turns_of_a_chat_draw_with_seeds_of_their_own_and_repeat_together() -> None:
    sampling = Sampling(max_new_tokens=5, temperature=1.5, seed=7)
    with TextModel.load(RunOptions(memory="25%")) as text_model:
        talks = [Conversation(text_model, sampling) for _ in range(2)]
        answers = [[talk.send(text) for text in ("Il mare", "E poi?")] for talk in talks]
        assert [a.new_ids for a in answers[0]] == [a.new_ids for a in answers[1]]
        assert [answer.sampling.seed for answer in answers[0]] == [7, 8]


def test_a_system_message_is_put_first_and_survives_a_reset() -> None:
    system = {"role": "system", "content": "Rispondi in rima."}
    with TextModel.load(RunOptions(memory="25%")) as text_model:
        ids = encode_prompt(text_model, "Il mare", system=system["content"])
        assert ids.tolist() == encode_messages(text_model, [system, {"role": "user", "content": "Il mare"}]).tolist()
        talk = Conversation(text_model, Sampling(max_new_tokens=2, system=system["content"]))
        talk.send("Il mare")
        talk.reset()
        assert talk.messages == [system]


def test_a_system_message_without_a_place_is_refused(tmp_path: Path) -> None:
    assert "put the words into the prompt" in call("run", *SHORT, "--system", "Sii breve.", "--no-chat").error
    place = model_folder(tmp_path / "model")
    (place / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    assert "leaves system messages out" in call("run", place, *SHORT, "--system", "Sii breve.").error


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--temperature", "-1", "--temperature must be a number from 0 to 1,000, not -1"),
        ("--temperature", "nan", "--temperature must be a number"),
        ("--temperature", "hot", "'--temperature'"),
        ("--top-p", "1.5", "--top-p must be a number from 0 to 1, not 1.5"),
        ("--top-k", "-3", "--top-k must be a whole number"),
        ("--min-p", "2", "--min-p must be a number from 0 to 1"),
        ("--repetition-penalty", "0", "--repetition-penalty must be a number"),
        ("--seed", "-1", "--seed must be a whole number"),
        ("--context", "0", "--context must be a whole number"),
    ],
)
def test_bad_values_are_one_line(flag: str, value: str, message: str) -> None:
    assert message in call("run", "-p", "x", flag, value).error


def test_a_bad_generation_config_is_one_line(tmp_path: Path) -> None:
    place = model_folder(tmp_path / "model", generation_config={"do_sample": True, "temperature": "hot"})
    assert "generation_config.json" in call("run", place, *SHORT).error


def test_options_are_checked_in_python_too() -> None:
    with pytest.raises(OptionError, match="top_p must be a number from 0 to 1, not 7"):
        Sampling(top_p=7)


def test_the_reference_model_stays_greedy_for_benchmarks() -> None:
    config = json.loads((reference.path() / "generation_config.json").read_text())
    assert not config.get("do_sample")
