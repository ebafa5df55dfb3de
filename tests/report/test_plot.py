import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from result_rows import CYCLE, EXPERT_BYTES, EXPERTS, RATES, result, row, sized, sweep

from hotset.errors import HotsetError
from hotset.report import check_plot, plot_hit_rates
from hotset.report.plot_lines import panel_of
from hotset.report.plot_style import looks
from hotset.shape import ModelShape
from hotset.sim import LruCurve, Sweep, lru_curve, simulate
from hotset.trace.synth import SynthConfig, synthesise

SHAPE = ModelShape(24, 32, 4, EXPERT_BYTES)


def words_of(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def draw(tmp_path: Path, *rows: object, **more: object) -> list[str]:
    path = tmp_path / "plot.svg"
    plot_hit_rates(result(*rows), path, **more)  # type: ignore[arg-type]
    return words_of(path)


def small_curve() -> tuple[list[object], LruCurve]:
    trace = synthesise(SynthConfig(layers=4, experts=16, top_k=2, requests=6, prompt_tokens=0, new_tokens=30))
    found = simulate({"demo": trace}, Sweep(policies=["lru"], budgets=["6%", "25%", "50%"], fit=0.0))
    return list(found.rows), lru_curve(trace.events())


def test_png_has_its_signature_and_size(tmp_path: Path) -> None:
    path = tmp_path / "plot.PNG"
    plot_hit_rates(result(*sweep()), path)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width == 1200  # six inches at 200 dpi
    assert height > 600


def test_pdf_is_a_pdf_without_a_date(tmp_path: Path) -> None:
    path = tmp_path / "plot.pdf"
    plot_hit_rates(result(*sweep()), path)
    assert path.read_bytes().startswith(b"%PDF")
    assert b"CreationDate" not in path.read_bytes()


def test_svg_keeps_names_as_text(tmp_path: Path) -> None:
    words = draw(tmp_path, *sweep())
    for name in ("demo", "lru", "lfu", "blend", "belady (bound)", "experts resident (%)", "decode hit rate (%)"):
        assert name in words
    assert any("slots per layer, 1 stream; demo 1,000 tokens" in word for word in words)


def test_svg_bytes_are_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        plot_hit_rates(result(*sweep(), *sweep(trace="other")), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "<dc:date>" not in (tmp_path / "a.svg").read_text()


def test_a_panel_per_trace_with_its_name(tmp_path: Path) -> None:
    words = draw(tmp_path, *(r for name in "abcd" for r in sweep(trace=f"trace-{name}")))
    assert [word for word in words if word.startswith("trace-")] == [f"trace-{name}" for name in "abcd"]


def test_token_cycles_are_marked_where_they_fall_inside(tmp_path: Path) -> None:
    words = draw(tmp_path, *sweep())
    assert words.count("token cycle") == 1
    assert words.count("2 cycles") == 1
    assert "2 cycles" not in draw(tmp_path, row(budget_slots=100))


def test_gib_axis_needs_the_size_of_an_expert(tmp_path: Path) -> None:
    assert "GiB of experts" not in draw(tmp_path, *sweep())
    assert "GiB of experts" in draw(tmp_path, *map(sized, sweep()))
    assert "GiB of experts" in draw(tmp_path, *sweep(), shapes={"demo": SHAPE})


def test_sizes_of_a_panel() -> None:
    panel = panel_of([sized(found) for found in sweep()], None, None)
    assert panel.cycle == pytest.approx(100 * CYCLE / EXPERTS)
    assert panel.gib == pytest.approx(EXPERTS * EXPERT_BYTES / 2**30)
    assert panel.reach == 50
    assert [line.policy for line in panel.lines][:2] == ["belady", "blend"]


def test_a_legend_names_each_line_once(tmp_path: Path) -> None:
    close = {f"decay:half_life={n}": (0.4, 0.7, 0.9 + n / 1e6) for n in range(30)}
    words = draw(tmp_path, *sweep(RATES | close))
    assert all(words.count(name) == 1 for name in (*RATES.keys() - {"belady"}, *close))


def test_only_decode_from_cold_is_drawn(tmp_path: Path) -> None:
    other = {"lru": (0.1, 0.2, 0.3), "static": (0.1, 0.2, 0.3), "belady": (0.2, 0.3, 0.4)}
    words = draw(tmp_path, *sweep(), *sweep(other, start="warm"), *sweep(other, phase="prefill"))
    assert "static" not in words


def test_lru_follows_the_exact_curve() -> None:
    rows, curve = small_curve()
    line = next(line for line in panel_of(rows, curve, None).lines if line.policy == "lru")
    assert line.exact
    assert len(line.x) > 20
    assert (np.diff(line.x) > 0).all()
    assert np.interp(line.points[0], line.x, line.y) == pytest.approx(line.points[1])


def test_a_curve_of_another_setting_is_not_drawn() -> None:
    rows, curve = small_curve()
    moved = [replace(found, hit_rate=found.hit_rate / 2) for found in rows]
    assert not any(line.exact for line in panel_of(moved, curve, None).lines)


def test_caption_says_where_lru_is_exact(tmp_path: Path) -> None:
    rows, curve = small_curve()
    assert "LRU" in " ".join(draw(tmp_path, *rows, curves={"demo": curve}))
    assert "LRU" not in " ".join(draw(tmp_path, *rows))


@pytest.mark.parametrize("name", ["price $5 and $x_", "名前", "<b>&amp;", "x" * 200])
def test_awkward_names_can_be_drawn(tmp_path: Path, name: str) -> None:
    plot_hit_rates(result(*sweep(trace=name)), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_extreme_rates_can_be_drawn(tmp_path: Path, rate: float) -> None:
    assert "lru" in draw(tmp_path, *sweep(dict.fromkeys(("lru", "belady"), (rate, rate, rate))))


@pytest.mark.parametrize("name", ["plot.bmp", "plot", "plot.png.txt"])
def test_unknown_suffix_is_refused(tmp_path: Path, name: str) -> None:
    for check in (check_plot, lambda path: plot_hit_rates(result(*sweep()), path)):
        with pytest.raises(HotsetError, match=r"must end in \.png, \.svg or \.pdf"):
            check(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HotsetError, match="cannot write"):
        plot_hit_rates(result(*sweep()), tmp_path / "missing" / "plot.png")
    with pytest.raises(HotsetError, match="cannot write"):
        check_plot(tmp_path / "missing" / "plot.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(HotsetError, match="cannot write"):
        plot_hit_rates(result(*sweep()), tmp_path / "folder.png")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_nothing_to_plot_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HotsetError, match="nothing to plot"):
        plot_hit_rates(result(*sweep(phase="prefill")), tmp_path / "plot.png")


def test_missing_matplotlib_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(HotsetError, match=r'pip install "hotset\[plot\]"'):
        plot_hit_rates(result(*sweep()), tmp_path / "plot.png")
    with pytest.raises(HotsetError, match="matplotlib"):
        check_plot(tmp_path / "plot.png")


def test_a_style_of_the_person_neither_matters_nor_changes(tmp_path: Path) -> None:
    import matplotlib

    plain = draw(tmp_path, *sweep())
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path"}):
        assert draw(tmp_path, *sweep()) == plain
        assert matplotlib.rcParams["font.size"] == 30


def test_importing_the_report_leaves_matplotlib_alone() -> None:
    script = "import sys, hotset.report; sys.exit('matplotlib' in sys.modules or 'numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_every_policy_has_its_own_look() -> None:
    names = ["lru", "decay:half_life=8", "decay", *(f"decay:half_life={n}" for n in range(20, 32))]
    found = looks([*names, "belady"])
    assert found["decay"] == looks(["decay"])["decay"]
    assert len({found[name] for name in names}) == len(names)
    assert len(looks(f"p{n}" for n in range(60))) == 61  # more than there are looks, and still drawn
