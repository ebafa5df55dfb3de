"""`hotset simulate` as a person and as a script uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calls import call

from hotset.trace.synth import SynthConfig, synthesise

pytestmark = pytest.mark.filterwarnings("default")
FIELDS = {
    "trace", "policy", "scope", "streams", "budget_slots", "budget_fraction", "phase", "start", "hit_rate",
    "misses_per_token", "bytes_per_token", "gap_closed", "evictions",
}  # fmt: skip


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "chat.safetensors"
    config = SynthConfig(
        layers=4, experts=16, top_k=2, requests=6, prompt_tokens=8, new_tokens=24, expert_bytes=1 << 20
    )
    synthesise(config).save(path)
    return path


def test_json_is_one_document_with_the_promised_fields(trace: Path) -> None:
    done = call("simulate", trace, "-p", "lru", "-p", "blend", "-b", "25%", "--json")
    assert done.code == 0, done.err
    assert done.err == ""
    rows = json.loads(done.out)["rows"]
    assert all(row.keys() >= FIELDS for row in rows)
    assert {row["policy"] for row in rows} == {"lru", "blend", "belady"}
    assert {(row["phase"], row["start"]) for row in rows} == {
        ("decode", "cold"), ("prefill", "cold"), ("decode", "warm"), ("prefill", "warm")
    }  # fmt: skip
    for row in rows:
        assert 0 <= row["hit_rate"] <= 1
        assert row["budget_slots"] == 16
        assert row["budget_fraction"] == 0.25
        assert row["bytes_per_token"] == pytest.approx(row["misses_per_token"] * (1 << 20))


def test_the_table_names_every_policy_and_the_bound(trace: Path) -> None:
    done = call("simulate", trace, "-b", "25%")
    assert done.code == 0, done.err
    for word in ("lru", "lfu", "lfru", "slru", "window", "decay", "layered", "static", "blend", "belady"):
        assert word in done.out
    assert "static needs counts" in done.err


def test_only_what_was_asked_for_and_the_bound(trace: Path) -> None:
    rows = json.loads(call("simulate", trace, "-p", "lfu", "-b", "25%", "--fit", "0", "--json").out)["rows"]
    assert {row["policy"] for row in rows} == {"lfu", "belady"}
    assert {row["start"] for row in rows} == {"cold"}
    assert all(row["gap_closed"] is not None for row in rows if row["phase"] == "decode")


def test_plot_and_csv_are_written(trace: Path, tmp_path: Path) -> None:
    done = call(
        "simulate",
        trace,
        "-p",
        "lru",
        "-b",
        "25%",
        "-b",
        "50%",
        "--plot",
        tmp_path / "p.svg",
        "--csv",
        tmp_path / "r.csv",
    )
    assert done.code == 0, done.err
    assert "<svg" in (tmp_path / "p.svg").read_text()
    assert (tmp_path / "r.csv").read_text().startswith("trace,policy,")


def test_link_adds_time(trace: Path) -> None:
    rows = json.loads(
        call("simulate", trace, "-p", "lru", "-b", "25%", "--link", "25GB/s", "--compute", "4ms", "--json").out
    )["rows"]
    assert all(row["time_s_per_token"] > row["stall_s_per_token"] >= 0 for row in rows)


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["-p", "nope"], "there are belady, blend"),
        (["-p", "lru:speed=9"], "it has admit"),
        (["-p", "decay:half_life=x"], "must be a number"),
        (["-b", "1 slots"], "the smallest that works is 2 slots"),
        (["-b", "huge"], "write a size"),
        (["--scope", "galaxy"], "layer, pool"),
        (["--mode", "sideways"], "batch, turns"),
        (["--prefill", "never"], "free, always, score"),
        (["--link", "25GB/s"], "--compute"),
        (["--link", "fast", "--compute", "4ms"], "25GB/s"),
        (["--plot", "p.bmp"], ".png"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(trace: Path, words: list[str], remedy: str) -> None:
    done = call("simulate", trace, *words)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert remedy in done.err


def test_a_damaged_file_is_one_line_and_exit_2(trace: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(trace.read_bytes()[:-100])
    done = call("simulate", broken)
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert "Traceback" not in done.err


def test_version_and_help() -> None:
    assert call("--version").out.startswith("hotset ")
    assert json.loads(call("version", "--json").out)["version"]
    contents = call("--help").out
    assert "simulate" in contents
    assert "trace" in contents


def test_a_policy_of_a_file(tmp_path: Path) -> None:
    own = Path(__file__).parents[2] / "examples" / "own_policy.py"
    done = call("simulate", "reference:it", "-p", f"{own}:admit=score", "-b", "25%", "--fit", "0", "--json")
    assert done.code == 0, done.err
    assert {row["policy"] for row in json.loads(done.out)["rows"]} == {"lru2:admit=score", "belady"}
    (tmp_path / "own.py").write_text("import nothing_of_this_name")
    error = call("simulate", "reference:it", "-p", tmp_path / "own.py").error
    assert "own.py does not work: ModuleNotFoundError: No module named 'nothing_of_this_name'" in error


def test_all_policies_where_none_is_named_and_the_bound_is_no_winner() -> None:
    from hotset.policies import names

    done = call("simulate", "reference:it", "-b", "25%", "--json")
    assert {row["policy"] for row in json.loads(done.out)["rows"]} == set(names())
    table = call("simulate", "reference:it", "-b", "25%").out
    marked = [line for line in table.splitlines() if " * " in line]
    assert marked
    assert not any("belady" in line for line in marked)
    assert table.count("belady (bound)") == 4
