"""Profiles, pins and statistics of a run, as a person and as a script uses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from typer.testing import CliRunner

from hotset.cli.app import app
from hotset.errors import HotsetError

RUN = ("run", "-p", "Il mercato del", "--memory", "25%", "--max-new-tokens", "16")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def call(*words: str | Path, text: str | None = None) -> Any:
    done = CliRunner().invoke(app, [str(word) for word in words], input=text)
    if isinstance(done.exception, HotsetError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done


def test_learn_then_start_warm() -> None:
    cold = json.loads(call(*RUN, "--learn", "italian", "--json").stdout)
    assert cold["stats"]["background_bytes"] == 0
    warm = json.loads(call(*RUN, "--profile", "italian", "--pin", "10%", "--json").stdout)
    assert warm["text"] == cold["text"]
    assert warm["stats"]["background_bytes"] > 0
    assert warm["stats"]["pins"] == 8
    listed = json.loads(call("profile", "list", "--json").stdout)
    assert "italian" in json.dumps(listed)
    again = json.loads(call(*RUN, "--learn", "italian", "--json").stdout)
    assert again["stats"]["background_bytes"] > 0  # what is learnt is also begun with


def test_stats_are_shown_beside_the_text_and_in_the_document() -> None:
    plain, told = call(*RUN), call(*RUN, "--stats", "--warm-pin", "8")
    assert told.stdout == plain.stdout
    assert "hottest experts" in told.stderr
    assert "against lru in its shadow" in told.stderr
    assert "warm-pin" in told.stderr
    document = json.loads(call(*RUN, "--stats", "--json").stdout)
    assert len(document["experts"]["layers"]) == 8
    assert document["requests"][0]["decode_tokens"] == 15
    decode = document["experts"]["phases"]["decode"]
    assert decode["hits"] + decode["misses"] == 15 * 64


def test_stats_also_where_everything_fits() -> None:
    document = json.loads(call("run", "-p", "Il", "--max-new-tokens", "6", "--stats", "--json").stdout)
    assert document["engine"] == "stock"
    assert document["experts"]["phases"]["decode"]["hits"] == 5 * 64


def test_a_plot_of_the_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    call(*RUN, "--plot", tmp_path / "run.svg")
    assert "hit rate" in (tmp_path / "run.svg").read_text().lower()
    with pytest.raises(HotsetError, match="png"):
        call(*RUN, "--plot", tmp_path / "run.gif")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--profile", "nobody"), "no such profile"),
        (("--pin", "20%"), "name a --profile"),
        (("--warm-pin", "often"), "number of tokens"),
        (("--learn", "a b"), "no name for a profile"),
    ],
)
def test_what_cannot_be_is_refused(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(HotsetError, match=why):
        call(*RUN, *words)


def test_pins_in_a_conversation() -> None:
    lines = "Ciao\n/pins\n/pin 20%\n/pins\n/stats\n/stats 3\n/pin 99%\n/unpin\n/pins\n/mark here\n/nonsense\n/help\n"
    done = call("chat", "--memory", "25%", "--max-new-tokens", "8", text=lines)
    said = done.stdout
    assert said.count("no expert is pinned") == 3
    assert "24 experts pinned" in said
    assert "layer 7:" in said
    assert "starve layer 0" in said
    assert "marked: here" in said
    assert "there is no /nonsense" in said
    assert "/plot FILE" in said


def test_a_profile_made_from_a_trace_warms_a_run() -> None:
    call("profile", "make", "reference:it", "-o", "made")
    document = json.loads(call(*RUN, "--profile", "made", "--json").stdout)
    assert document["stats"]["background_bytes"] > 0


def test_a_profile_made_from_a_recorded_run_is_of_its_model(tmp_path: Path) -> None:
    call(*RUN, "--trace", tmp_path / "run.safetensors")
    call("profile", "make", tmp_path / "run.safetensors", "-o", "recorded")
    warm = json.loads(call(*RUN, "--profile", "recorded", "--json").stdout)
    assert warm["stats"]["background_bytes"] > 0


def test_a_model_that_is_none_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for place, why in ((tmp_path / "nowhere", "there is no folder"), (tmp_path, "cannot load the model")):
        with pytest.raises(HotsetError, match=why):
            call("profile", "make", "reference:it", "-o", "made", "--model", place)
