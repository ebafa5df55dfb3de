"""The report: one file that needs nothing else, whole whatever a trace lacks, safe whatever it says, and small."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from routed_samples import by_hand, drawn, without

from hotset.analysis.analyse import Analysis, Question, SaliencyGrids, analyse, count_parts, join_traces
from hotset.analysis.caching import CacheQuestion
from hotset.analysis.document import to_document, to_tables
from hotset.analysis.page import to_page
from hotset.analysis.page_parts import slug
from hotset.analysis.page_saliency import MEANINGS
from hotset.analysis.page_tokens import token_name
from hotset.analysis.saliency import MEASURES
from hotset.analysis.write import data_folder, write_report
from hotset.errors import HotsetError
from hotset.shape import ExpertKey
from hotset.trace import Phase, Trace
from hotset.trace.run import Run
from hotset.trace.synth import SynthConfig, synthesise

QUICK = Question(caching=CacheQuestion(policies=["lru"], budgets=["50%"]))
VOID = {"meta", "br"}


class Checker(HTMLParser):
    """Notes what a page holds, and that every element is closed in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "action", "data", "xlink:href"):
                self.links.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert len(set(checker.ids)) == len(checker.ids)
    for link in checker.links:
        assert link.startswith("#")
        assert link[1:] in checker.ids
    assert "script" not in checker.tags
    assert not re.search(r"https?://|@import|url\(", page)
    return checker


def made(trace: Trace, **more: object) -> Analysis:
    return analyse("sample", trace, QUICK, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def full() -> Analysis:
    random = np.random.default_rng(0)
    trace = drawn(0, predictions=True)
    grids = {name: random.random((3, 12)) for name in ("frequency", "REAP")}
    saliency = SaliencyGrids(grids, [ExpertKey(1, 7)], "the sample")
    return made(trace, saliency=saliency, text_of=lambda token: f" <b>{token}</b>\n")


def test_one_file_that_needs_nothing_else(full: Analysis) -> None:
    page, figures = to_page(full, version="1")
    checker = checked(page)
    assert checker.tags.count("figcaption") == checker.tags.count("figure")
    assert len(re.findall(r'<li><a href="#', page)) == checker.tags.count("section") == 10
    assert "prefers-color-scheme:dark" in page
    assert "@media print" in page
    names = [figure.name for figure in figures]
    for name in ("use", "weights", "distance-topic", "pairs-within", "pairs-between", "repeats", "depth", "hit-rates"):
        assert name in names
    assert {"residency-lru", "lookahead", "saliency-frequency"} <= set(names)
    assert len(set(names)) == len(names)


def test_figures_are_drawings_of_their_own(full: Analysis) -> None:
    for figure in to_page(full)[1]:
        root = ElementTree.fromstring(figure.standalone())  # noqa: S314 - our own
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.get("aria-label") == figure.title
        width, height = map(float, (root.get("viewBox") or "").split()[2:])
        for text in root.iter("{http://www.w3.org/2000/svg}text"):
            assert 0 <= float(text.get("x", "0")) <= width
            assert 0 <= float(text.get("y", "0")) <= height


def test_a_cell_for_every_expert(full: Analysis) -> None:
    (figure,) = (each for each in to_page(full)[1] if each.name == "use")
    titles = re.findall(r"<title>layer (\d+), expert (\d+): ([\d,]+) uses", figure.svg)
    found = {(int(layer), int(expert)): int(uses.replace(",", "")) for layer, expert, uses in titles}
    assert found == {place: int(uses) for place, uses in np.ndenumerate(full.usage.uses)}


def test_the_residency_of_the_run_is_drawn_first() -> None:
    trace = drawn(0)
    run = Run(policy="lfru", scope="layer", slots=18, staging=0, prefetch_rows=0)
    analysis = analyse("run", without(trace, meta={**trace.meta, **run.to_meta()}))
    page, figures = to_page(analysis)
    residency = [figure.name for figure in figures if figure.name.startswith("residency-")]
    assert residency == ["residency-lfru", "residency-lru", "residency-lfu", "residency-blend"]
    assert "with lfru in 18 slots, as when the trace was recorded: blue" in page
    assert page.count(" in 18 slots") == 4 + (" recorded with lfru in 18 slots" in page)
    assert to_document(analysis)["cache"]["recorded"] == {"policy": "lfru", "budget": "18 slots", "slots": 18}


def test_the_residency_is_drawn_cell_by_cell(full: Analysis) -> None:
    (figure,) = (each for each in to_page(full)[1] if each.name == "residency-lru")
    watched = full.caching.kept[0].watched
    drawn_cells = dict.fromkeys(("hit", "miss", "idle"), 0)
    width = min((940 - 64) / len(watched.used), 28)
    for path, kind in re.findall(r'<path d="([^"]*)" class="(hit|miss|idle)"', figure.svg):
        drawn_cells[kind] = sum(round(float(run) / width) for run in re.findall(r"h(\d[\d.]*)v", path))
    assert drawn_cells == {
        "hit": int((watched.used & watched.resident).sum()),
        "miss": int((watched.used & ~watched.resident).sum()),
        "idle": int((~watched.used & watched.resident).sum()),
    }


def test_what_a_trace_says_is_text() -> None:
    evil = '<script>alert("x")</script>'
    trace = drawn(0)
    labels = tuple({evil: evil + str(r % 2)} for r in range(trace.requests))
    trace = without(trace, labels=labels, meta={"model": evil, "source": evil})
    found = analyse(evil, trace, QUICK, text_of=lambda _: evil)
    page, figures = to_page(found)
    checked(page)
    assert "<script" not in page
    assert all(re.fullmatch(r"[\w-]+", figure.name) for figure in figures)
    assert found.labels[0].values == (evil + "0", evil + "1")


def test_tokens_show_what_would_not_be_seen() -> None:
    assert token_name(5, lambda _: " a\n") == "\u2423a\u23ce"
    assert token_name(5, None) == "#5"
    assert token_name(5, lambda _: "") == "#5"
    assert len(token_name(5, lambda _: "x" * 100)) == 24


LACKING = {
    "no label": lambda trace: without(trace, labels=()),
    "no weights": lambda trace: without(trace, weights=None),
    "no tokens": lambda trace: without(trace, token_ids=None),
    "one request": lambda trace: trace.select([0]),
    "one token": lambda trace: trace.take(np.array([3])),
    "prompts": lambda trace: trace.take(trace.phase == Phase.PREFILL),
    "answers": lambda trace: trace.take(trace.phase == Phase.DECODE),
    "one layer": lambda _: drawn(1, layers=1),
    "top 1": lambda _: drawn(1, top_k=1),
    "one expert": lambda _: by_hand([[[0]]] * 3, 1),
    "a layer that never ran": lambda _: by_hand([[[0, 1], [-1, -1]]] * 9, 4),
    "all experts": lambda _: by_hand([[[0, 1]], [[1, 0]]] * 4, 2),
}


@pytest.mark.parametrize("name", LACKING)
def test_whatever_a_trace_lacks(name: str) -> None:
    trace = LACKING[name](drawn(0))
    found = analyse(name, trace, Question(caching=CacheQuestion(policies=["lru"], budgets=["100%"])))
    page, figures = to_page(found)
    checked(page)
    assert not re.search(r"\b(nan|inf|None)\b", re.sub(r"<style>.*?</style>", "", page))
    for figure in figures:
        ElementTree.fromstring(figure.standalone())  # noqa: S314 - our own
    document = to_document(found)
    for part, there in (("margins", trace.weights), ("driving_tokens", trace.token_ids)):
        assert (document[part] is None) == (there is None)
    for text in to_tables(found).values():
        assert len({len(row) for row in csv.reader(text.splitlines())}) == 1


def test_a_large_model_stays_small_and_readable(full: Analysis) -> None:
    """48 layers of 128 experts and 24 labels: a few megabytes, with every cell of the use grid."""
    config = SynthConfig(layers=48, experts=128, top_k=8, requests=30, prompt_tokens=0, new_tokens=12, topics=24)
    trace = synthesise(config)
    trace = without(trace, labels=tuple({"topic": str(r % 24)} for r in range(30)))
    page, figures = to_page(made(trace))
    checked(page)
    assert len(page) < 3_000_000
    (use,) = (figure for figure in figures if figure.name == "use")
    assert use.svg.count("<title>layer") == 48 * 128


def test_the_document_and_the_tables(full: Analysis) -> None:
    document = to_document(full)
    assert np.array(document["usage"]["uses"]).sum() == full.usage.uses.sum()
    assert document["saliency"]["super_experts"] == [[1, 7]]
    (label,) = document["labels"].values()
    assert np.array(label["uses"]).sum() == full.labels[0].uses.sum()
    assert label["divergence_bits_by_layer"] == full.labels[0].mean_divergence.tolist()
    drawn, kept = document["cache"]["drawn"], full.caching.kept
    assert [len(step) for step in drawn["used"]] == kept[0].watched.used.sum(axis=1).tolist()
    assert [each["policy"] for each in drawn["resident"]] == [each.policy for each in kept]
    assert full.drivers is not None
    assert document["driving_tokens"]["experts"] == len(full.drivers)
    assert len(next(iter(document["locality"]["repeat_rate_by_layer"].values()))) == 3
    tables = {name: list(csv.DictReader(text.splitlines())) for name, text in to_tables(full).items()}
    assert set(tables) == {
        "experts.csv", "layers.csv", "labels.csv", "distances.csv", "pairs.csv", "tokens.csv", "cache.csv"
    }  # fmt: skip
    assert len(tables["experts.csv"]) == 36
    assert {"layer", "expert", "prefill_uses", "decode_uses", "share", "REAP"} <= set(tables["experts.csv"][0])
    uses = [int(row["prefill_uses"]) + int(row["decode_uses"]) for row in tables["experts.csv"]]
    assert uses == full.usage.uses.ravel().tolist()
    assert len(tables["layers.csv"]) == 3
    assert sum(int(row["uses"]) for row in tables["labels.csv"]) == full.labels[0].uses.sum()


def test_everything_is_written_and_what_is_old_goes(full: Analysis, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    files = write_report(full, out)
    assert files[0] == out
    assert sorted(files[1:]) == sorted(data_folder(out).iterdir())
    document = json.loads((tmp_path / "report/report.json").read_text())
    assert document["usage"]["by_layer"][0]["tokens"] == full.usage.tokens[0]
    (tmp_path / "report/mine.txt").write_text("a note")
    again = write_report(made(without(drawn(0), labels=(), token_ids=None)), out)
    left = {path.name for path in data_folder(out).iterdir()}
    assert left == {path.name for path in again[1:]} | {"mine.txt"}
    assert not list(tmp_path.glob(".*"))


def test_without_data_there_is_one_file(full: Analysis, tmp_path: Path) -> None:
    assert write_report(full, tmp_path / "page", data=False) == [tmp_path / "page"]
    assert [path.name for path in tmp_path.iterdir()] == ["page"]
    assert data_folder(tmp_path / "page") == tmp_path / "page.data"


def test_several_traces_are_told_apart() -> None:
    labels = tuple({"topic": label["topic"]} for label in drawn(1).labels)
    a, b = without(drawn(0), labels=()), without(drawn(1), labels=labels)
    name, trace = join_traces({"a": a, "b": b})
    assert name == "a, b"
    assert [label["trace"] for label in trace.labels] == ["a"] * 6 + ["b"] * 6
    assert [study.key for study in made(trace).labels] == ["topic", "trace"]
    with pytest.raises(HotsetError, match="analyse the traces of one model at a time"):
        join_traces({"a": a, "b": drawn(1, experts=9)})


def test_labels_that_are_not_there_are_refused() -> None:
    for labels, message in (((), "this trace has no labels"), (drawn(0).labels, "there are number, topic")):
        with pytest.raises(HotsetError, match=message):
            analyse("x", without(drawn(0), labels=labels), Question(labels=["user"]))
    same = without(drawn(0), labels=({"user": "me"},) * 6)
    with pytest.raises(HotsetError, match="all requests have the same 'user'"):
        analyse("x", same, Question(labels=["user"]))


def test_progress_is_counted() -> None:
    calls: list[None] = []
    trace = drawn(0)
    analyse("x", trace, QUICK, advance=lambda: calls.append(None))
    assert len(calls) == count_parts(trace, QUICK)


def test_traces_are_analysed_without_torch() -> None:
    code = "import sys, hotset.analysis.write, hotset.analysis.token_text; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_names_of_files_differ_where_words_do() -> None:
    words = ["user", "User", "a b", "a-b", "a:b", "\u00e9", "\u00e8", "", "x" * 50, "x" * 51]
    names = [slug(each) for each in words]
    assert names[0] == "user"
    assert len(set(names)) == len(words)
    assert all(re.fullmatch(r"[a-z0-9-]{1,60}", name) for name in names)


def test_every_measure_of_saliency_is_told_in_words() -> None:
    assert MEANINGS.keys() == MEASURES.keys()
    text = to_page(analyse("drawn", drawn(), QUICK, saliency=SaliencyGrids({"msan": np.ones((3, 8))}, [], "s")))[0]
    assert "by msan (mean squared norm of its output), the strongest" in text
