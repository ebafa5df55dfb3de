"""`hotset profile` and `hotset stats` as a person and as a script use them."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hotset.cli.app import app
from hotset.errors import HotsetError, ProfileError
from hotset.profile import Fingerprint, Profile
from hotset.profile.statistics import History, Mark
from hotset.shape import ModelShape
from hotset.trace.synth import SynthConfig, synthesise

CONFIG = SynthConfig(layers=3, experts=16, top_k=2, requests=4, prompt_tokens=8, new_tokens=16, expert_bytes=1 << 20)


def call(*words: str | Path, text: str | None = None) -> Any:
    done = CliRunner().invoke(app, [str(word) for word in words], input=text)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def answer(*words: str | Path) -> Any:
    """The one JSON document that the command prints."""
    done = call(*words, "--json")
    assert done.exit_code == 0
    return json.loads(done.stdout)


def hotset(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hotset", *map(str, words)],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "hotset" / "profiles"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "chat.safetensors"
    synthesise(CONFIG).save(path)
    return path


def make(seed: int = 0, **changes: Any) -> Profile:
    random, grid = np.random.default_rng(seed), (2, 3, 16)
    fields = {
        "shape": ModelShape(3, 16, 2, 4096),
        "fingerprint": Fingerprint("Qwen3MoeForCausalLM", "abc"),
        "uses": random.gamma(0.5, size=grid) * 100,
        "tokens": np.array([300, 700]),
        "created": "2026-11-01T00:00:00Z",
        "updated": "2026-11-15T00:00:00Z",
        "policy": "blend",
        "learnt": {"mean.rates": random.random((3, 16))},
        "hits": random.integers(0, 90, grid),
        "misses": random.integers(0, 90, grid),
        "residency": random.integers(0, 4, grid[1:]).astype(np.uint8),
        "history": History(np.full((4, 3), 7, np.int64), (Mark(3, "code"),)),
    }
    return Profile(**(fields | changes))


@pytest.fixture
def two(home: Path) -> Path:
    home.mkdir(parents=True)
    make(1).save(home / "a.safetensors")
    make(2).save(home / "b.safetensors")
    return home


def test_an_empty_list_says_how_to_begin(home: Path) -> None:
    assert "hotset profile make" in call("profile", "list").stdout
    assert answer("profile", "list") == {"folder": str(home), "profiles": []}
    assert not home.exists()


def test_a_broken_file_does_not_break_the_list(two: Path) -> None:
    (two / "cut.safetensors").write_bytes((two / "a.safetensors").read_bytes()[:-9])
    (two / "folder.safetensors").mkdir()
    (two / "loop.safetensors").symlink_to(two / "loop.safetensors")
    found = {entry["name"]: entry for entry in answer("profile", "list")["profiles"]}
    assert list(found) == ["a", "b", "cut", "folder", "loop"]
    assert found["a"]["damaged"] is None
    assert found["a"]["tokens"] == {"prefill": 300, "decode": 700}
    assert found["a"]["bytes"] == (two / "a.safetensors").stat().st_size
    assert all(found[name]["damaged"] for name in ("cut", "folder", "loop"))
    text = call("profile", "list").stdout
    for word in ("Qwen3Moe", "3 x 16", "300", "700", "2026-11-15 00:00", "cut is damaged"):
        assert word in text


def test_names_cannot_steer_the_terminal(two: Path) -> None:
    (two / "\x1b[2Jodd.safetensors").write_bytes(b"")
    assert "\x1b" not in call("profile", "list").stdout


def test_show_tells_all(two: Path) -> None:
    document = answer("profile", "show", "a")
    assert set(document["concentration"]) == {"12.5%", "25.0%", "50.0%"}
    assert 0 < document["entropy"]["min"] <= document["entropy"]["max"] <= 1
    assert document["learnt"] == ["mean.rates"]
    assert 0 < document["hit_rate"] < 1
    assert document["history"] == {"spans": 4, "tokens": 28, "marks": [{"tokens": 3, "label": "code"}]}
    assert "1 table of blend" in call("profile", "show", two / "a.safetensors").stdout


def test_show_of_a_bare_profile(two: Path) -> None:
    bare = make(uses=np.zeros((2, 3, 16)), learnt={}, hits=None, misses=None, residency=None, history=History.empty())
    bare.save(two / "bare.safetensors")
    document = answer("profile", "show", "bare")
    assert document["hit_rate"] is None
    assert document["entropy"]["mean"] is None
    assert "none were counted" in call("profile", "show", "bare").stdout


def test_make_creates_the_folder_and_says_what_is_missing(trace: Path, home: Path) -> None:
    done = call("profile", "make", trace, "-o", "chat", "--json")
    document = json.loads(done.stdout)
    assert document["architecture"] == "unknown"
    assert document["tokens"] == {"prefill": 32, "decode": 64}
    assert Path(document["file"]) == home / "chat.safetensors"
    assert "--allow-foreign" in done.stderr
    with pytest.raises(HotsetError, match="--force"):
        call("profile", "make", trace, "-o", "chat")
    assert call("profile", "make", trace, "-o", "chat", "--force").exit_code == 0


def test_make_takes_the_model_from_the_trace(tmp_path: Path) -> None:
    from dataclasses import replace

    told = {"architecture": "OlmoeForCausalLM\x1b", "digest": "1234"}
    replace(synthesise(CONFIG), meta=told).save(tmp_path / "t.safetensors")
    done = call("profile", "make", tmp_path / "t.safetensors", "-o", tmp_path / "p.safetensors")
    assert done.stderr == ""
    assert Profile.load(tmp_path / "p.safetensors").fingerprint == Fingerprint("OlmoeForCausalLM?", "1234")


def test_make_takes_the_model_from_its_folder(trace: Path) -> None:
    pytest.importorskip("transformers")
    from hotset import reference
    from hotset.models.fingerprint import fingerprint_of_folder

    mark = fingerprint_of_folder(reference.path())
    assert answer("profile", "make", trace, "-o", "x", "--model", reference.path())["digest"] == mark.digest
    assert answer("profile", "make", "reference:it", "-o", "y")["digest"] == mark.digest


def test_merge_weighs(two: Path, tmp_path: Path) -> None:
    document = answer("profile", "merge", "a", "b", "-o", "both", "--weights", "2,1")
    assert document["tokens"] == {"prefill": 600, "decode": 1400}
    merged = Profile.load(two / "both.safetensors")
    assert np.allclose(merged.uses, 2 * make(1).uses + make(2).uses)
    assert merged.policy == "blend"
    out = tmp_path / "mine.safetensors"
    assert call("profile", "merge", "a", "b", "-o", out).exit_code == 0
    assert out.exists()


def test_diff_names_the_direction(two: Path) -> None:
    document = answer("profile", "diff", "a", "b", "--top", "3")
    assert len(document["cosine"]["layers"]) == 3
    assert document["cosine"]["min"] == min(document["cosine"]["layers"])
    assert set(document["shared_hot_set"]) == {"12.5%", "25.0%", "50.0%"}
    assert len(document["changed"]) == 3
    for row in document["changed"]:
        assert row["direction"] == ("hotter" if row["after"] > row["before"] else "cooler")
    assert " in b" in call("profile", "diff", "a", "b").stdout


def test_a_profile_of_another_model_is_named(two: Path) -> None:
    make(fingerprint=Fingerprint("Qwen3MoeForCausalLM", "xyz")).save(two / "tuned.safetensors")
    make(fingerprint=Fingerprint("Other", "abc")).save(two / "other.safetensors")
    for words in (("diff", "a"), ("merge", "-o", "m", "a")):
        with pytest.raises(ProfileError, match=r"other does not go with a: .*Other model"):
            call("profile", *words, "other")
        with pytest.raises(ProfileError, match=r"tuned does not go with a: .*--allow-foreign"):
            call("profile", *words, "tuned")
        assert call("profile", *words, "tuned", "--allow-foreign").exit_code == 0


def test_forget_deletes_profiles_only(two: Path, trace: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    for other in (trace, tmp_path / "letter.txt", tmp_path, "nobody"):
        with pytest.raises(ProfileError, match="only profiles are forgotten"):
            call("profile", "forget", other, "--yes")
    assert (tmp_path / "letter.txt").exists()
    assert trace.exists()
    with pytest.raises(ProfileError, match="pass --yes"):
        call("profile", "forget", "a")
    assert answer("profile", "forget", "a", "--yes")["forgotten"] == "a"
    assert [entry["name"] for entry in answer("profile", "list")["profiles"]] == ["b"]


@pytest.mark.parametrize(("reply", "stays"), [("n\n", True), ("y\n", False)])
def test_forget_asks_on_a_terminal(two: Path, reply: str, stays: bool) -> None:
    import pty

    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "hotset", "profile", "forget", "a", "--json"]
    with subprocess.Popen(command, stdin=follower, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        os.write(leader, reply.encode())
        out, err = process.communicate(timeout=60)
    for end in (leader, follower):
        os.close(end)
    assert b"Delete" in err
    assert (two / "a.safetensors").exists() == stays
    assert process.returncode == int(stays)
    assert out == b"" if stays else json.loads(out)["forgotten"] == "a"


def test_export_writes_a_line_per_expert(two: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.csv"
    assert answer("profile", "export", "a", "--csv", out)["rows"] == 48
    rows = list(csv.DictReader(out.read_text().splitlines()))
    header = "layer,expert,prefill_uses,decode_uses,hotness,hits,misses,resident,pinned"
    assert ",".join(rows[0]) == header
    profile = make(1)
    assert float(rows[17]["decode_uses"]) == profile.uses[1, 1, 1]
    assert profile.hits is not None
    assert int(rows[17]["hits"]) == profile.hits[:, 1, 1].sum()
    with pytest.raises(HotsetError, match="--force"):
        call("profile", "export", "a", "--csv", out)


def test_stats_by_layer_and_by_expert(two: Path) -> None:
    document = answer("stats", "a", "--top", "4")
    assert document["phases"]["decode"]["tokens"] == 700
    assert [layer["layer"] for layer in document["layers"]] == [0, 1, 2]
    assert all(len(layer["top"]) == 4 for layer in document["layers"])
    assert [layer["layer"] for layer in answer("stats", "a", "--layer", "1")["layers"]] == [1]
    assert "hottest experts" in call("stats", "a").stdout
    assert "where" in call("stats", "a", "--layer", "2").stdout
    with pytest.raises(ProfileError, match="layers 0 to 2"):
        call("stats", "a", "--layer", "3")


@pytest.mark.usefixtures("two")
def test_stats_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert call("stats", "a", "--plot", tmp_path / "a.svg").exit_code == 0
    assert "MoE layer" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["profile", "show", "nobody"], "hotset profile list"),
        (["profile", "show", "no name"], "give a path"),
        (["profile", "show", "~nobody-at-all/x"], "without ~"),
        (["profile", "show", "."], "no name for a profile"),
        (["profile", "merge", "a", "b", "-o", "c", "--weights", "2;1"], "such as 2,1"),
        (["profile", "merge", "a", "b", "-o", "c", "--weights", "1"], "give 2 positive weights"),
        (["profile", "merge", "a", "b", "-o", "c", "--weights", "1,1e999"], "give 2 positive weights"),
        (["profile", "merge", "a", "b", "-o", "b"], "--force"),
        (["profile", "merge", "a", "b", "-o", "/no/such/folder/c"], "does the folder exist"),
        (["profile", "export", "a", "--csv", "/no/such/folder/c"], "does the folder exist"),
        (["profile", "export", "a", "--csv", "/"], "give the name of a file"),
        (["profile", "forget", "a"], "--yes"),
        (["profile", "make", "nothing", "-o", "x"], "no such trace"),
        (["stats", "a", "--layer", "-1"], "layers 0 to 2"),
        (["stats", "a", "--plot", "p.bmp"], ".png"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(two: Path, words: list[str], remedy: str) -> None:
    done = hotset(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert remedy in done.stderr


def test_a_folder_that_is_none(home: Path, trace: Path) -> None:
    home.parent.mkdir(parents=True)
    home.write_text("in the way")
    with pytest.raises(ProfileError, match="XDG_DATA_HOME"):
        call("profile", "list")
    with pytest.raises(ProfileError, match="XDG_DATA_HOME"):
        call("profile", "make", trace, "-o", "x")
