"""`--config FILE` and `hotset.toml` at the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calls import PROMPT, call

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_takes_its_options_from_a_file_and_flags_beat_it() -> None:
    Path("few.toml").write_text('memory = "25%"\npolicy = "lru"\nmax_new_tokens = 3\nstaging = 5\nwarm_pin = 64\n')
    done = call("run", *PROMPT, "--config", "few.toml", "--policy", "lfu", "--threads", "2", "--json")
    assert (done.code, done.err) == (0, "")
    document = json.loads(done.out)
    assert (document["memory"], document["policy"], document["new_tokens"]) == ("25%", "lfu", 3)
    assert document["stats"]["staging"] == 5


def test_a_file_in_the_working_directory_is_announced_for_chat_and_record() -> None:
    Path("hotset.toml").write_text('memory = "25%"\nmax_new_tokens = 2\n')
    chat = call("chat", "--json", told=b"Il mare\n")
    assert chat.err.startswith("note: options from hotset.toml in this folder")
    assert json.loads(chat.out)["turns"][0]["new_tokens"] == 2
    recorded = call("trace", "record", "--prompts", "reference:it", "--limit", "1", "-o", "t.safetensors", "--json")
    assert recorded.err.startswith("note: options from hotset.toml")
    assert json.loads(recorded.out)["decode_tokens"] == 1


@pytest.mark.parametrize("words", [("run", *PROMPT), ("chat",), ("trace", "record", "--prompts", "p", "-o", "t")])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file bad.toml"),
        ("memory = ", "bad.toml is not TOML"),
        ("memroy = 1", 'bad.toml: there is no option "memroy": did you mean memory?'),
        ("context = 'many'", "bad.toml: context must be a whole number, not 'many'"),
        ("memory = 'much'", 'bad.toml: memory: cannot read the budget "much"'),
        ("trust_remote_code = true", "bad.toml: trust_remote_code cannot be set in a file"),
    ],
)
def test_a_bad_file_ends_in_one_line_that_names_it(words: tuple[str, ...], content: str | None, message: str) -> None:
    if content is not None:
        Path("bad.toml").write_text(content)
    assert call(*words, "--config", "bad.toml").error.startswith(message)


@pytest.mark.parametrize("key", ["policy", "host_policy", "prefetch"])
def test_code_in_a_file_of_options_names_the_way_that_works(key: str) -> None:
    Path("hotset.toml").write_text(f'{key} = "./mru.py:admit=score"\n')
    flag = f"--{key.replace('_', '-')} ./mru.py:admit=score"
    assert f"a file of options runs no code: give {flag} where the command is typed" in call("run", *PROMPT).error
