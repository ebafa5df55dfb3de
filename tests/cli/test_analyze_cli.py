"""`hotset analyze` as a person and as a script uses it: traces, a model with prompts, and what cannot be."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from calls import call

from hotset import Trace, reference
from hotset.shape import ModelShape
from hotset.trace.synth import SynthConfig, synthesise

pytestmark = pytest.mark.filterwarnings("default")

ONE = ("-p", "lru", "-b", "25%")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace without predictions and token ids."""
    path = tmp_path_factory.mktemp("traces") / "bare.safetensors"
    synthesise(SynthConfig(layers=4, experts=16, top_k=2, requests=6, prompt_tokens=8, new_tokens=24)).save(path)
    return path


def test_the_report_of_a_trace(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    done = call("analyze", "reference:it", "reference:c", "-o", out, *ONE)
    assert done.code == 0, done.err
    assert "effective experts of 64" in done.out
    assert f"{out}: " in done.out
    page = out.read_text(encoding="utf-8")
    for words in ("Specialisation by label", "Distance between values of domain", "Tokens that drive experts",
                  "Gate look-ahead", "hotset reference model"):  # fmt: skip
        assert words in page
    assert page.count("<tr><td>") > 20
    assert "#1" not in page.split("Tokens that drive experts</h2>")[1].split("</section>")[0]  # all have their text
    document = json.loads((tmp_path / "report/report.json").read_text(encoding="utf-8"))
    assert document["labels"]["domain"]["values"] == ["c", "it"]
    text = (tmp_path / "report/tokens.csv").read_text(encoding="utf-8")
    assert text.startswith("layer,expert,expert_uses,token,text,")
    assert "analysing" not in done.err  # no bar in a pipe


def test_json_is_one_document(bare: Path) -> None:
    done = call("analyze", bare, "--json")
    assert done.code == 0, done.err
    assert done.err == ""
    document = json.loads(done.out)
    assert document["summary"]["tokens"] == Trace.load(bare).tokens
    assert {row["policy"] for row in document["cache"]["rows"]} == {"lru", "lfu", "blend", "nextuse", "belady"}
    assert list(document["labels"]) == ["topic"]
    assert document["driving_tokens"] is None
    assert document["files"] == []


def test_without_a_file_the_findings_are_told(bare: Path) -> None:
    done = call("analyze", bare, *ONE, "--label", "topic")
    assert done.code == 0, done.err
    assert "mean distance between values of topic" in done.out
    assert "no token ids" in done.err
    assert "-o report.html" in done.err


def test_a_page_alone(bare: Path, tmp_path: Path) -> None:
    done = call("analyze", bare, "-o", tmp_path / "one.html", "--no-data", *ONE, "--layer", "0", "--request", "1")
    assert done.code == 0, done.err
    assert [path.name for path in tmp_path.iterdir()] == ["one.html"]
    assert "layer 0 over time" in (tmp_path / "one.html").read_text(encoding="utf-8")


def test_the_smallest_traces_have_a_report(tmp_path: Path) -> None:
    for experts, top_k in ((1, 1), (2, 2), (3, 2)):
        kept = tmp_path / f"{experts}.safetensors"
        Trace(
            shape=ModelShape(1, experts, top_k),
            experts=np.tile(np.arange(top_k, dtype=np.int16), (2, 1, 1)),
            request=np.zeros(2, np.int32),
            step=np.arange(2, dtype=np.int32),
            phase=np.ones(2, np.uint8),
        ).save(kept)
        done = call("analyze", kept, "-p", "lru", "-o", tmp_path / f"{experts}.html")  # a quarter would be no slot
        assert (done.code, done.err) == (0, "")
        assert f"1 layer \u00d7 {experts} expert" in done.out
        assert f"hits with lru in {top_k} slots; optimum 50.0 %" in done.out


def test_a_trace_in_which_nothing_was_routed(tmp_path: Path) -> None:
    kept = tmp_path / "nothing.safetensors"
    trace = synthesise(SynthConfig(layers=2, experts=8, top_k=2, requests=1, prompt_tokens=2, new_tokens=3))
    replace(trace, experts=np.full_like(trace.experts, -1), weights=None).save(kept)
    done = call("analyze", kept, *ONE, "-o", tmp_path / "nothing.html")
    assert (done.code, done.err) == (0, "")
    assert "0             experts of 16 that no token chose; by chance 0.0" in done.out


def test_a_budget_in_bytes_takes_the_size_of_an_expert(bare: Path) -> None:
    bytes_ = ("-p", "lru", "-b", "16MiB", "--json")
    assert "pass --expert-bytes" in call("analyze", bare, *bytes_).error
    done = call("analyze", bare, *bytes_, "--expert-bytes", "1MiB")
    assert {kept["slots"] for kept in json.loads(done.out)["cache"]["kept"]} == {16}
    assert "a model does" in call("analyze", "reference", "--prompts", bare, "--expert-bytes", "1MiB").error


def test_a_model_with_prompts(tmp_path: Path) -> None:
    prompts = [tmp_path / "words.txt", tmp_path / "code.jsonl"]
    prompts[0].write_text("Il mercato del\nLa casa di\n")
    prompts[1].write_text('{"prompt": "int main(void)", "language": "c"}\n')
    kept = tmp_path / "kept.safetensors"
    done = call("analyze", reference.path(), "--prompts", prompts[0], prompts[1], "--memory", "25%",
                "--max-new-tokens", "6", "--trace", kept, "-o", tmp_path / "model.html", *ONE, "--json")  # fmt: skip
    assert done.code == 0, done.err
    document = json.loads(done.out)
    trace = Trace.load(kept)
    assert document["summary"]["tokens"] == trace.tokens
    assert [label["file"] for label in trace.labels] == ["words.txt", "words.txt", "code.jsonl"]
    assert trace.labels[2]["language"] == "c"
    assert document["labels"]["file"]["tokens"] == [
        int((trace.request == 2).sum()),
        int((trace.request < 2).sum()),
    ]
    uses = np.zeros((8, 64), int)
    for layer, expert in zip(*np.unravel_index(_cells(trace), uses.shape), strict=True):
        uses[layer, expert] += 1
    assert document["usage"]["uses"] == uses.tolist()
    assert [score["distance"] for score in document["lookahead"]["scores"]] == [1, 2]
    assert str(tmp_path / "model.html") in document["files"]
    frequency = np.array(document["saliency"]["measures"]["frequency"])
    assert np.array_equal(np.rint(frequency * trace.tokens), uses)  # counted in the same run, apart from the trace
    assert {"reap", "msan", "largest"} <= document["saliency"]["measures"].keys()
    margins = [row["p50"] for row in document["choice_margin"]]
    assert all(0 < margin < 10 for margin in margins)
    page = (tmp_path / "model.html").read_text(encoding="utf-8")
    assert "Saliency" in page
    assert "The margin of the choice itself was recorded as the model ran." in page
    assert "choice_margin_p50" in (tmp_path / "model/layers.csv").read_text(encoding="utf-8").splitlines()[0]


def test_saliency_is_left_out_where_it_is_not_wanted_or_would_count_padding() -> None:
    words = ("--prompts", "reference:it", "--limit", "2", "--max-new-tokens", "2", "--memory", "25%", *ONE, "--json")
    for more, told in ((("--no-saliency",), False), (("--batch", "2"), True)):
        done = call("analyze", *words, *more)
        assert json.loads(done.out)["saliency"] is None
        assert ("recorded one prompt at a time: leave --batch out" in done.err) == told


def _cells(trace: Trace) -> list[int]:
    return [
        layer * 64 + expert
        for token in trace.experts.tolist()
        for layer, chosen in enumerate(token)
        for expert in chosen
        if expert >= 0
    ]


def _texts(target: Path, *more: object) -> tuple[list[str], str]:
    done = call("analyze", target, *ONE, "--json", *more)
    found = json.loads(done.out)["driving_tokens"]["strongest"]
    return [driver["text"] for expert in found for driver in expert["drivers"] if driver["text"]], done.err


def test_a_recorded_trace_has_the_text_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace = reference.trace("it")
    meta = {"model": "reference", "architecture": "Qwen3MoeForCausalLM", "source": "hotset"}
    replace(trace, meta=meta).save(own := tmp_path / "own.safetensors")
    texts, errors = _texts(own)
    assert " di" in texts
    assert "tokenizer" not in errors
    replace(trace, meta=meta | {"model": "mine"}).save(mine := tmp_path / "mine.safetensors")
    assert _texts(mine)[0] == []
    shutil.copytree(reference.path(), tmp_path / "mine")
    told, errors = _texts(mine)
    assert told == texts
    assert "the text of tokens is by the tokenizer in mine; --tokenizer FOLDER names another" in errors
    (tmp_path / "mine/tokenizer.json").write_text("{}")
    told, errors = _texts(mine)
    assert (told, "tokens have no text: " in errors) == ([], True)
    replace(trace, meta=meta | {"model": "mine", "architecture": "Other"}).save(mine)
    assert _texts(mine) == ([], "")


def test_ctrl_c_keeps_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def interrupting_bar(_: str, __: int) -> Iterator[Callable[[], None]]:
        yield lambda: signal.raise_signal(signal.SIGINT)

    from hotset.cli import analyze_model  # noqa: F401 - a command imports it when it runs

    monkeypatch.setattr(sys.modules["hotset.cli.analyze_model"], "progress_bar", interrupting_bar)
    kept, out = tmp_path / "kept.safetensors", tmp_path / "report.html"
    words = ("--limit", "3", "--max-new-tokens", "2", "--memory", "25%", "--trace", kept, "-o", out)
    done = call("analyze", "--prompts", "reference:it", *words)
    assert done.code == 130
    assert "no report was written" in done.err
    assert Trace.load(kept).requests == 1
    assert not out.exists()


def test_files_that_are_there_stay(bare: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("mine")
    assert "exists: choose another name, or pass --force" in call("analyze", bare, "-o", out).error
    assert out.read_text() == "mine"
    out.unlink()
    (tmp_path / "report").mkdir()
    (tmp_path / "report/notes.txt").write_text("mine")
    assert "report exists: choose another name with -o" in call("analyze", bare, "-o", out).error
    assert call("analyze", bare, "-o", out, "--force", *ONE).code == 0
    assert (tmp_path / "report/notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to analyse: name a trace, or a model with --prompts FILE"),
        (("none.safetensors",), "no such trace"),
        (("org/name",), "is not a trace: to run it as a model, give it prompts with --prompts"),
        ((".",), "is not a trace: to run it as a model"),
        (("reference",), "reference is not a trace: to run it as a model, give it prompts with --prompts FILE"),
        (("model.gguf",), "is not a trace"),
        (("reference:nothing",), 'no workload is called "nothing"'),
        (("reference:it", "--label", "user"), "no request has a label 'user': there are domain, session"),
        (("reference:it", "--label", "domain"), "all requests have the same 'domain'"),
        (("reference:it", "-p", "lrru"), "no policy is called"),
        (("reference:it", "-b", "much"), "cannot read the budget"),
        (("reference:it", "-b", "1%"), "cannot hold one event"),
        (("reference:it", "--layer", "8", *ONE), "there is no layer 8 to draw"),
        (("reference:it", "--request", "99", *ONE), "there is no request 99 to draw"),
        (("reference:it", "--trace", "t.safetensors"), "--trace keeps what a model routes"),
        (("reference:it", "--tokenizer", "."), "cannot read tokenizer.json"),
        (("reference:it", "-o", "no/such/folder/report.html"), "there is no folder"),
    ],
)
def test_what_cannot_be_is_one_line(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in call("analyze", *words).error
    assert list(tmp_path.iterdir()) == []


def test_foreign_files(bare: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.safetensors"
    text.write_text("no trace at all, only words")
    assert "hotset trace import" in call("analyze", text).error
    assert "is no tokenizer.json" in call("analyze", bare, "--tokenizer", text).error
    assert "leave --prompts out" in call("analyze", bare, "--prompts", text).error
    assert "of different models cannot be put together" in call("analyze", bare, "reference:it").error
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    assert "holds no prompts" in call("analyze", "--prompts", empty).error


def test_a_policy_of_a_file_is_replayed(bare: Path) -> None:
    own = Path(__file__).parents[2] / "examples" / "own_policy.py"
    document = json.loads(call("analyze", bare, "-p", own, "-b", "25%", "--json").out)
    assert "lru2" in {row["policy"] for row in document["cache"]["rows"]}
    assert "there is no file none.py" in call("analyze", bare, "-p", "./none.py").error


@pytest.mark.parametrize(
    "words",
    [
        ("--limit", "3"), ("--batch", "2"), ("--memory", "25%"), ("--device", "cpu"), ("--dtype", "bfloat16"),
        ("--max-new-tokens", "9"), ("--record-lookahead", "1"), ("--no-chat",), ("--chat",), ("--no-saliency",),
        ("--experts", "dense"), ("--trust-remote-code",),
    ],
)  # fmt: skip
def test_what_only_a_run_knows_is_refused_with_traces(bare: Path, words: tuple[str, ...]) -> None:
    assert f"{words[0]} is for running a model: give one and --prompts FILE" in call("analyze", bare, *words).error


@pytest.mark.parametrize("words", [("-o", "r.html"), ("--policy", "lru"), ("--layer", "1"), ("--limit", "3")])
def test_what_a_comparison_does_not_use_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    (text := tmp_path / "text.txt").write_text("Il mercato")
    ended = call("analyze", "--compare", "reference", "other", "--text", text, *words)
    assert "is of no use with --compare" in ended.error
    assert ("--out" if words[0] == "-o" else words[0]) in ended.error


def test_prompts_without_a_model_are_named(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("Il mercato\n")
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    line = f"{second} is no model, and --prompts needs one: hotset analyze MODEL --prompts {first} {second}"
    assert line in call("analyze", "--prompts", first, second).error
    assert "reference:c is no model" in call("analyze", "--prompts", "reference:it", "reference:c").error


def test_a_report_is_html(bare: Path, tmp_path: Path) -> None:
    assert f"write -o {tmp_path / 'r.html'}" in call("analyze", bare, "-o", tmp_path / "r.txt").error
    assert list(tmp_path.iterdir()) == []
