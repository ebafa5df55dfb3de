import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotset.errors import HotsetError
from hotset.profile.statistics import NEVER, History, Mark, Statistics
from hotset.report.heat import figure_of, plot_statistics
from hotset.shape import ModelShape


def history(rows: int = 12, marks: tuple[Mark, ...] = ()) -> History:
    hits = 60 + np.arange(rows) % 20
    return History(np.stack([np.full(rows, 10), hits, 100 - hits], axis=1).astype(np.int64), marks)


def statistics(layers: int = 4, experts: int = 16, top_k: int = 2, **more: object) -> Statistics:
    rng = np.random.default_rng(1)
    uses = rng.integers(1, 50, (2, layers, experts))
    hits = uses // 2
    nothing = np.zeros((layers, experts), np.int64)
    found = Statistics(
        shape=ModelShape(layers, experts, top_k),
        uses=uses.astype(float),
        hits=hits,
        misses=uses - hits,
        tokens=np.array([300, 200]),
        loads=nothing,
        loaded_bytes=nothing,
        rate=np.full((layers, experts), top_k / experts),
        window=nothing,
        age=np.full_like(nothing, NEVER),
        resident=rng.random((layers, experts)) < 0.4,
        pinned=np.zeros((layers, experts), bool),
        history=history(),
    )
    return replace(found, **more)  # type: ignore[arg-type]


def unused(layers: int = 4, experts: int = 16) -> Statistics:
    found, counts = statistics(layers, experts, 1), np.zeros((2, layers, experts), np.int64)
    no = np.zeros((layers, experts), bool)
    return replace(
        found, uses=counts.astype(float), hits=counts, misses=counts, tokens=np.zeros(2, np.int64), resident=no,
        pinned=no, history=History.empty(),
    )  # fmt: skip


def draw(tmp_path: Path, found: Statistics, title: str = "") -> list[str]:
    """The words in a file."""
    path = tmp_path / "heat.svg"
    plot_statistics(found, path, title=title)
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def words_of(found: Statistics) -> list[str]:
    """The words of the figure line by line, as a file has them, without writing one: that takes longer."""
    from matplotlib.text import Text  # here: a test holds that importing hotset's part does not import it

    texts = [text for text in figure_of(found).findobj(Text) if text.get_visible()]
    return [line for text in texts for line in text.get_text().splitlines()]


def placed(found: Statistics, resident: list[int], pinned: list[int]) -> Statistics:
    """The same with these experts of the first layer in memory or pinned, and no others."""
    grids = np.zeros((2, *found.resident.shape), bool)
    grids[0, 0, resident] = True
    grids[1, 0, pinned] = True
    return replace(found, resident=grids[0], pinned=grids[1])


def test_every_panel_is_there(tmp_path: Path) -> None:
    words = draw(tmp_path, statistics(), "my model")
    for word in (
        "my model", "Use of each expert (decode)", "uses per 100 decode tokens", "MoE layer", "expert",
        "Hit rate by layer", "hit rate (%)", "Hit rate over time", "decode tokens", "hottest experts of a layer (%)",
        "mean of the layers",
    ):  # fmt: skip
        assert word in words
    assert any(re.fullmatch(r"In memory: \d+ % of experts, \d+ % of uses", word) for word in words)
    assert any(re.fullmatch(r"Hottest 25 % take \d+ % of uses", word) for word in words)
    assert "4 MoE layers of 16 experts, 2 per token; 200 decode and 300 prefill tokens." in words


@pytest.mark.parametrize("name", ["a.svg", "a.PNG", "a.pdf"])
def test_bytes_are_the_same_every_time(tmp_path: Path, name: str) -> None:
    (tmp_path / "again").mkdir()
    paths = tmp_path / name, tmp_path / "again" / name
    for path in paths:
        plot_statistics(statistics(), path, title="twice")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert [path.name for path in (tmp_path / "again").iterdir()] == [name]


def test_a_png_fills_a_laptop_screen(tmp_path: Path) -> None:
    plot_statistics(statistics(), tmp_path / "heat.png")
    data = (tmp_path / "heat.png").read_bytes()
    assert [int.from_bytes(data[at : at + 4], "big") for at in (16, 20)] == [2400, 1500]  # 12 x 7.5 inches at 200 dpi


def test_prefill_is_drawn_where_nothing_was_decoded() -> None:
    found = statistics()
    found.uses[1] = 0
    words = words_of(found)
    assert "Use of each expert (prefill)" in words
    assert "uses per 100 prefill tokens" in words


def test_heat_is_in_uses_per_100_tokens_even_where_counts_decay() -> None:
    found = statistics(1, 4, 2)
    found.uses[1] = [[1.0, 2.0, 2.0, 3.0]]
    for scale in (1.0, 0.01):
        image = figure_of(replace(found, uses=found.uses * scale), "").axes[0].images[0]
        assert np.asarray(image.get_array()).tolist() == pytest.approx(np.array([[25.0, 50.0, 50.0, 75.0]]))


def test_layers_without_use_are_told_from_cold_ones() -> None:
    found = statistics()
    found.uses[:, 2] = 0
    image = figure_of(found, "").axes[0].images[0]
    assert np.ma.getmaskarray(image.get_array()).any(axis=1).tolist() == [False, False, True, False]
    assert any("Grey: 1 layer without use." in word for word in words_of(found))


def test_legend_counts_who_is_in_memory_and_pinned() -> None:
    words = words_of(placed(statistics(), [1, 2, 3], [3, 4]))
    assert {"not in memory (60)", "in memory (2)", "pinned (1)", "pinned, not in memory (1)"} <= set(words)
    assert "pinned (1)" not in words_of(placed(statistics(), [1, 2, 3], []))


def test_pins_carry_a_mark_where_it_can_be_seen() -> None:
    few, many = statistics(), statistics(61, 256, 8)
    assert figure_of(placed(few, [1, 2], [2]), "").axes[1].lines[0].get_xydata().tolist() == [[2, 0]]
    assert not figure_of(placed(many, [1, 2], [2]), "").axes[1].lines


def test_unknown_memory_is_said_and_not_drawn() -> None:
    words = words_of(placed(statistics(), [], []))
    assert not any(word.startswith("In memory") for word in words)
    assert any("Which experts are in memory is not known." in word for word in words)


def test_hit_rates_of_both_phases_have_their_overall_value() -> None:
    found = statistics(hits=np.full((2, 4, 16), 3), misses=np.full((2, 4, 16), 1))
    words = words_of(found)
    assert "decode (all layers: 75.0 %)" in words
    assert "prefill (all layers: 75.0 %)" in words
    found.hits[0] = found.misses[0] = 0
    assert not any(word.startswith("prefill") for word in words_of(found))


def test_what_is_missing_is_said() -> None:
    counts = np.zeros((2, 4, 16), np.int64)
    words = words_of(statistics(hits=counts, misses=counts, history=History.empty()))
    assert {"no hits or", "misses counted", "no hits over time were kept"} <= set(words)
    words = words_of(unused())
    assert words.count("no expert was used yet") == 2
    assert any("0 decode and 0 prefill tokens" in word for word in words)


def test_memory_numbers_the_layers_where_use_does_not() -> None:
    words = words_of(placed(unused(), [1], []))
    assert words.count("MoE layer") == 1
    assert "In memory: 2 % of experts" in words


@pytest.mark.parametrize(
    "found",
    [
        *(statistics(*shape) for shape in ((1, 1, 1), (1, 8, 8), (3, 1, 1), (61, 256, 8), (200, 4, 2))),
        *(unused(*shape) for shape in ((1, 1), (61, 256))),
    ],
    ids=lambda found: f"{found.shape.layers}-{found.shape.experts}-{'used' if found.uses.any() else 'unused'}",
)
def test_every_shape_can_be_drawn(tmp_path: Path, found: Statistics) -> None:
    plot_statistics(found, tmp_path / "heat.png")
    assert (tmp_path / "heat.png").stat().st_size > 10_000


def test_marks_are_named() -> None:
    words = words_of(statistics(history=history(marks=(Mark(60, "python"), Mark(0, "prose")))))
    assert {"python", "prose"} <= set(words)


def test_names_of_marks_are_cut_and_safe(tmp_path: Path) -> None:
    words = draw(tmp_path, statistics(history=history(marks=(Mark(0, "a\x1b[31m" + "b" * 300), Mark(60, "$x_$")))))
    label = next(word for word in words if word.startswith("a?[31m"))
    assert label.endswith("...")
    assert len(label) <= 28
    assert "$x_$" in words


def test_marks_too_close_are_counted() -> None:
    marks = tuple(Mark(60 + n // 100, f"mark{n}") for n in range(200))
    words = words_of(statistics(history=history(marks=marks)))
    assert sum(word.startswith("mark") for word in words) == 1
    assert "decode tokens (199 marks too close to the next to be named)" in words


def test_named_marks_do_not_overlap() -> None:
    marks = tuple(Mark(n * 4, f"workload {n}") for n in range(30))
    figure = figure_of(statistics(history=history(marks=marks)), "")
    names = [text for axes in figure.axes for text in axes.texts if text.get_text().startswith("workload")]
    assert len(names) == 30
    assert {text.get_rotation() for text in names} == {40.0}
    places = np.array([text.xy[0] for text in names]) / 120 * names[0].axes.bbox.width * 72 / figure.dpi
    assert np.diff(places).min() * np.sin(np.radians(40)) > 7  # points: the height of a line


def test_marks_outside_the_history_are_left_out(tmp_path: Path) -> None:
    marks = (Mark(-5, "before"), Mark(10**400, "after"), Mark(120, "end"))
    words = draw(tmp_path, statistics(history=history(marks=marks)))
    assert "end" in words
    assert not {"before", "after"} & set(words)
    assert "lost" not in draw(tmp_path, statistics(history=replace(History.empty(), marks=(Mark(0, "lost"),))))


def test_many_spans_are_gathered_without_losing_any() -> None:
    from hotset.report.heat_history import _gathered

    long = history(4000)
    coarse = _gathered(long)
    assert len(coarse.spans) <= 160
    assert coarse.spans.sum(axis=0).tolist() == long.spans.sum(axis=0).tolist()
    assert "Hit rate over time (pale: each of 4,000 spans)" in words_of(statistics(history=long))


@pytest.mark.parametrize("spans", [[[0, 5, 5]], [[5, 0, 0]], [[0, 1, 0], [4, 0, 0], [2, 1, 1]], [[3, 7, 0]]])
def test_odd_histories_can_be_drawn(spans: list[list[int]]) -> None:
    assert any(word.startswith("Hit rate over") for word in words_of(statistics(history=History(np.array(spans)))))


@pytest.mark.parametrize("title", ["price $5 and $x_", "名前, <b>&amp; " + "x" * 300 + "\x1b[2J", "\x1b[2J, <b>&amp;"])
def test_awkward_titles_can_be_drawn(tmp_path: Path, title: str) -> None:
    words = draw(tmp_path, statistics(), title)
    assert not any("\x1b" in word or len(word) > 120 for word in words)


@pytest.mark.parametrize("name", ["heat.bmp", "heat", "heat.png.txt"])
def test_unknown_suffix_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(HotsetError, match=r"must end in \.png, \.svg or \.pdf"):
        plot_statistics(statistics(), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HotsetError, match="cannot write"):
        plot_statistics(statistics(), tmp_path / "missing" / "heat.png")


def test_missing_matplotlib_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(HotsetError, match=r'pip install "hotset\[plot\]"'):
        plot_statistics(statistics(), tmp_path / "heat.png")
    with pytest.raises(HotsetError, match=r'pip install "hotset\[plot\]"'):
        figure_of(statistics(), "")


def test_a_style_of_the_person_neither_matters_nor_changes(tmp_path: Path) -> None:
    import matplotlib

    plot_statistics(statistics(), tmp_path / "plain.svg")
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "image.cmap": "jet"}):
        before = dict(matplotlib.rcParams)
        plot_statistics(statistics(), tmp_path / "styled.svg")
        figure_of(statistics(), "")
        assert dict(matplotlib.rcParams) == before
    assert (tmp_path / "plain.svg").read_bytes() == (tmp_path / "styled.svg").read_bytes()


def test_a_notebook_shows_the_figure() -> None:
    data = figure_of(statistics(), "shown")._repr_png_()  # type: ignore[attr-defined]
    assert [int.from_bytes(data[at : at + 4], "big") for at in (16, 20)] == [1200, 750]


def test_drawing_leaves_pyplot_alone(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, 'tests/report'); from test_heat import *;"
        "bare = 'matplotlib' not in sys.modules;"
        f"plot_statistics(statistics(), r'{tmp_path / 'a.png'}'); figure_of(statistics(), '')._repr_png_();"
        "sys.exit(not bare or 'matplotlib.pyplot' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", script], check=False, cwd=root).returncode == 0
