"""`hotset trace record`, and what the other commands make of its traces."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hotset import Trace
from hotset.cli.app import app
from hotset.errors import HotsetError
from hotset.generation import TextModel
from hotset.generation.sampling import Sampling
from hotset.options import Place, RunOptions, declared

record = sys.modules["hotset.cli.record"]  # the package holds the command under this name, too

pytestmark = pytest.mark.filterwarnings("default")

PROMPTS = [
    {"prompt": "Il mercato del", "domain": "it", "weight": 2},
    {"text": "int main(void)\n{", "labels": {"domain": "c"}},
    {"prompt": "La funzione calcola la media dei numeri contenuti", "domain": "it"},
]


def call(*words: str | Path) -> Any:
    done = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(done.exception, HotsetError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, PROMPTS)) + "\n")
    return path


@pytest.fixture(scope="module")
def recorded(prompts: Path) -> tuple[Path, dict[str, Any]]:
    out = prompts.parent / "one.safetensors"
    done = call(
        "trace",
        "record",
        "--prompts",
        prompts,
        "-o",
        out,
        "--memory",
        "25%",
        "--max-new-tokens",
        "8",
        "--no-chat",
        "--json",
    )
    return out, json.loads(done.stdout)


def test_what_is_recorded_is_what_was_run(recorded: tuple[Path, dict[str, Any]]) -> None:
    out, document = recorded
    trace = Trace.load(out)
    assert trace.requests == document["requests"] == 3
    assert trace.tokens == document["tokens"] == document["stats"]["tokens"]
    assert document["decode_tokens"] == 3 * 7
    assert [label["domain"] for label in trace.labels] == ["it", "c", "it"]
    assert trace.labels[0]["weight"] == "2"
    assert document["complete"]


def test_info_and_simulate_take_it(recorded: tuple[Path, dict[str, Any]]) -> None:
    out, document = recorded
    info = json.loads(call("trace", "info", out, "--json").stdout)["traces"][0]
    assert info["tokens"] == document["tokens"]
    rows = json.loads(call("simulate", out, "-p", "blend", "-b", "25%", "--fit", "0", "--json").stdout)["rows"]
    replayed = next(row for row in rows if row["policy"] == "blend" and row["phase"] == "decode")
    assert replayed["hit_rate"] == pytest.approx(document["decode_hit_rate"])
    again = json.loads(call("simulate", out, "--fit", "0", "--json").stdout)
    assert any(note.endswith("its cold row repeats that run") for note in again["notes"])
    rows = [row for row in again["rows"] if (row["policy"], row["phase"]) == ("blend", "decode")]
    assert {row["hits"] for row in rows if row["budget"].endswith("slots")} == {document["stats"]["decode"]["hits"]}


def test_a_batch_leaves_no_padding_behind(prompts: Path, recorded: tuple[Path, dict[str, Any]]) -> None:
    out = prompts.parent / "batch.safetensors"
    call("trace", "record", "--prompts", prompts, "-o", out, "--max-new-tokens", "8", "--no-chat", "--batch", "2")
    alone, together = Trace.load(recorded[0]), Trace.load(out)
    assert together.tokens == alone.tokens
    assert together.labels == alone.labels
    assert alone.token_ids is not None
    assert together.token_ids is not None
    for request in range(3):
        prompt = (alone.request == request) & (alone.phase == 0), (together.request == request) & (together.phase == 0)
        np.testing.assert_array_equal(alone.token_ids[prompt[0]], together.token_ids[prompt[1]])


def test_limit_force_and_shipped_prompts(tmp_path: Path) -> None:
    out = tmp_path / "t.safetensors"
    words = ("trace", "record", "--prompts", "reference:c", "-o", out, "--limit", "1", "--max-new-tokens", "2")
    assert "of 1 request in" in call(*words).stdout
    with pytest.raises(HotsetError, match="exists"):
        call(*words)
    call(*words, "--force")
    assert Trace.load(out).labels[0]["domain"] == "c"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "\n\n", "holds no prompts"),
        ("p.json", "{}", "must hold a list"),
        ("p.json", "[3]", "prompt 1 must be text"),
        ("p.jsonl", '"a"\n{oops', "line 2, is not JSON"),
        ("p.jsonl", '{"prompt": " "}', "prompt 1 must be text"),
        ("p.txt", "x " * 5000, "prompt 1: the prompt has"),
    ],
)
def test_bad_prompts_are_one_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(HotsetError, match=message) as caught:
        call("trace", "record", "--prompts", tmp_path / name, "-o", tmp_path / "t.safetensors")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "t.safetensors").exists()


@pytest.mark.parametrize("at", ["between prompts", "within a prompt"])
def test_ctrl_c_keeps_what_is_complete(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    @contextmanager
    def interrupting_bar(what: str, total: int) -> Iterator[Any]:
        yield lambda: signal.raise_signal(signal.SIGINT)

    def interrupting_room(_: Any, tokens: int, wished: int) -> int:
        if wished > 1 and tokens > 5:  # the second prompt is longer than the first
            signal.raise_signal(signal.SIGINT)
        return wished

    if at == "between prompts":
        monkeypatch.setattr(record, "progress_bar", interrupting_bar)
    else:
        monkeypatch.setattr(TextModel, "max_new_tokens_for", interrupting_room)
    out = tmp_path / "t.safetensors"
    words = ["trace", "record", "--prompts", prompts, "-o", out, "--max-new-tokens", "4", "--no-chat", "--json"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 130
    document = json.loads(done.stdout)
    assert not document["complete"]
    assert Trace.load(out).requests == document["requests"] == 1
    assert "1 of 3 prompts" in done.stderr
    assert list(tmp_path.iterdir()) == [out]


def test_prefetch_and_staging_are_for_a_recording_to_choose(prompts: Path) -> None:
    words = (
        "--memory",
        "25%",
        "--max-new-tokens",
        "2",
        "--limit",
        "1",
        "--prefetch",
        "off",
        "--staging",
        "6",
        "--json",
    )
    done = call("trace", "record", "--prompts", prompts, "-o", prompts.parent / "chosen.safetensors", *words)
    stats = json.loads(done.stdout)["stats"]
    assert stats["staging"] == 6
    assert stats["prefetch"] is None
    assert "prefetch" not in stats["memory"]


def test_run_and_record_spell_their_options_alike(prompts: Path, tmp_path: Path) -> None:
    import typer

    commands: Any = typer.main.get_command(app)
    run = {each.name: set(each.opts) for each in commands.commands["run"].params}
    record = {each.name: set(each.opts) for each in commands.commands["trace"].commands["record"].params}
    for name in run.keys() & record.keys():
        assert run[name] == record[name], name
    assert {each.name for each in declared(RunOptions, Place.COMMAND)} <= run.keys() & record.keys()
    assert {each.name for each in declared(Sampling, Place.COMMAND)} <= run.keys() & record.keys()
    assert run["trace"] <= record["out"]


def test_the_name_that_run_has_for_a_recording(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.safetensors"
    call("trace", "record", "--prompts", prompts, "--trace", out, "--memory", "25%", "--max-new-tokens", "2",
         "--limit", "1")  # fmt: skip
    assert Trace.load(out).requests == 1
