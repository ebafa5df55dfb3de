"""The `trace` commands, as a person would call them."""

import json

import numpy as np
import pytest
from foreign_traces import csv_text, json_rows, json_text, token_text, write_npz
from trace_samples import make_trace, same
from typer.testing import CliRunner

from hotset.cli.trace import app
from hotset.errors import HotsetError
from hotset.trace import Phase, Trace

RUNNER = CliRunner()


def call(*words):
    result = RUNNER.invoke(app, [str(word) for word in words])
    if isinstance(result.exception, HotsetError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def call_json(*words):
    return json.loads(call(*words, "--json").stdout)


@pytest.fixture
def path(tmp_path, trace):
    trace.save(tmp_path / "t.safetensors")
    return tmp_path / "t.safetensors"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.safetensors"


def test_import(tmp_path, trace, out):
    source = tmp_path / "a.route.csv"
    source.write_text(csv_text(trace))
    document = call_json("import", source, "-o", out, "--expert-bytes", "2KiB", "--model", "m")
    assert document["tokens"] == 15
    found = Trace.load(out)
    assert found.shape.expert_bytes == 2048
    assert found.meta["model"] == "m"


def test_import_says_what_it_inferred(tmp_path, trace, out):
    source = write_npz(tmp_path / "a.npz", trace)
    assert "inferred" in call("import", source, "-o", out).stderr
    assert "inferred" not in call("import", source, "-o", out, "--force", "--experts", 8).stderr


def test_import_of_part_of_a_file_in_requests(tmp_path, trace, out):
    source = tmp_path / "a.csv"
    source.write_text(token_text(trace))
    assert call_json("import", source, "-o", out, "--first", 7)["tokens"] == 7
    with pytest.raises(HotsetError, match="steps are numbered"):
        call("import", source, "-o", out, "--force", "--steps", "x")


def test_import_says_how_it_understood_steps(tmp_path, trace, out):
    source = tmp_path / "a.jsonl"
    rows = [row for row in json_rows(trace) if row["request"] < 1]
    source.write_text(json_text([*rows, *(row | {"request": 1} for row in rows)]))
    assert "each request numbers its own steps" in call("import", source, "-o", out).stderr
    assert call_json("import", source, "-o", out, "--force", "--steps", "shared")["steps"] == 4
    both = [[row, row | {"request": 1}] for row in rows]
    source.write_text(json_text([row for pair in both for row in pair]))  # as a server writes them: interleaved
    said = call("import", source, "-o", out, "--force").stderr
    assert "are taken for one forward pass, a batch: --steps request, if each request numbers its own" in said
    for words in ("request", "shared"):
        assert "steps of one number" not in call("import", source, "-o", out, "--force", "--steps", words).stderr


def test_every_kind_is_named_in_help():
    from hotset.cli.trace import _KINDS
    from hotset.trace.importers import kinds

    assert sorted(_KINDS.replace(" or ", ", ").split(", ")) == sorted(kinds())


def test_outputs_are_not_overwritten(path, out):
    out.write_text("precious")
    commands = [
        ("import", path, "-o", out),
        ("cut", path, "-o", out, "--first", 3),
        ("merge", path, path, "-o", out),
        ("interleave", path, "-o", out, "--streams", 2),
        ("split", path, "--fit", out, "--judge", out.with_suffix(".b")),
    ]
    for words in commands:
        with pytest.raises(HotsetError, match="exists: choose another name, or pass --force"):
            call(*words)
    assert out.read_text() == "precious"
    call(*commands[1], "--force")
    assert Trace.load(out).tokens == 3


def test_info(path):
    document = call_json("info", path, path)
    assert [entry["tokens"] for entry in document["traces"]] == [15, 15]
    text = call("info", path).stdout
    assert "tiny" in text
    assert "used again by chance" in text


def test_info_shows_hostile_names_as_they_are(tmp_path):
    path = tmp_path / "t.safetensors"
    make_trace(lengths=(2,), labels=({"[red]": "\x1b[2J[/]"},), meta={"model": "[bold]x\x07"}).save(path)
    text = call("info", path).stdout
    assert "[bold]x?" in text
    assert "label [red]" in text
    assert "\x1b" not in text


def test_cut(path, out, trace):
    cases = [
        (("--requests", "0,2"), np.isin(trace.request, [0, 2])),
        (("--requests", "1-2"), trace.request > 0),
        (("--tokens", "3:9"), slice(3, 9)),
        (("--tokens", "9:"), slice(9, None)),
        (("--label", "topic=a"), trace.request != 1),
        (("--label", "topic=a", "--label", "id=2"), trace.request == 2),
        (("--phase", "decode"), trace.phase == Phase.DECODE),
        (("--first", 4), slice(0, 4)),
        (("--requests", "1-2", "--first", 4), slice(5, 9)),
    ]
    for options, rows in cases:
        call("cut", path, "-o", out, "--force", *options)
        assert same(Trace.load(out), trace.take(rows)), options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing to cut"),
        (("--requests", "0-3"), "the trace has 0 to 2"),
        (("--requests", "2-1"), "there are no requests 2-1"),
        (("--requests", "a"), "such as 0-9,20"),
        (("--tokens", "5"), "such as 1000:2000"),
        (("--tokens", "99:"), "the trace has 0 to 14"),
        (("--label", "topic"), "KEY=VALUE"),
        (("--label", "colour=red"), "the trace has id, topic"),
        (("--label", "topic=c"), "no tokens are left"),
        (("--phase", "both"), '"prefill" or "decode"'),
    ],
)
def test_cut_faults(path, out, options, message):
    with pytest.raises(HotsetError, match=message):
        call("cut", path, "-o", out, *options)
    assert not out.exists()


def test_split(path, tmp_path, trace):
    fit, judge = tmp_path / "fit", tmp_path / "judge"
    document = call_json("split", path, "--fit", fit, "--judge", judge, "--fraction", 0.3)
    assert (document["fit"]["requests"], document["judge"]["requests"]) == (1, 2)
    assert Trace.load(fit).tokens + Trace.load(judge).tokens == trace.tokens
    with pytest.raises(HotsetError, match="two different files"):
        call("split", path, "--fit", fit, "--judge", fit, "--force")


def test_merge_and_interleave(path, out, tmp_path):
    assert call_json("merge", path, path, "-o", out)["requests"] == 6
    busy = tmp_path / "busy.safetensors"
    assert call_json("interleave", out, "--streams", 6, "-o", busy)["steps"] < Trace.load(out).steps
    with pytest.raises(HotsetError, match="batch"):
        call("interleave", out, "--streams", 6, "--mode", "x", "-o", busy, "--force")
    assert "only 6 requests" in call("interleave", out, "--streams", 9, "-o", busy, "--force").stderr


def test_missing_file(tmp_path):
    with pytest.raises(HotsetError, match="no such trace"):
        call("info", tmp_path / "none")


def test_every_command_shows_an_example():
    for command in ("import", "info", "cut", "split", "merge", "interleave"):
        assert "Example: hotset trace" in call(command, "--help").stdout
