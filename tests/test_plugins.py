"""Policies and forecasts of users: a file, or an entry point, known by name wherever a name is read."""

import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from numba.core.errors import NumbaError

import hotset.forecasts
import hotset.policies
from hotset import ahead, plugins
from hotset.cli.ending import run_and_report
from hotset.errors import HotsetError, PolicyError
from hotset.options import RunOptions
from hotset.options.files import read_options
from hotset.reference import trace
from hotset.sim import Sweep, simulate
from hotset.sim.forecasting import evaluate
from hotset.testing import ContractError, check_forecast, check_policy

OWN = Path(__file__).parents[1] / "examples" / "own_policy.py"

POLICY = """
    from dataclasses import dataclass
    from typing import Any, NamedTuple

    from hotset.policies import Grid, Policy, compiled


    class State(NamedTuple):
        last: Grid


    @compiled
    def observe(state, table, event):
        for expert in event.experts:
            state.last[event.layer, expert] = event.tick


    @compiled
    def score(state, table, event, layer, expert):
        return SCORE


    @dataclass(frozen=True, kw_only=True)
    class Own(Policy, name="NAME", state=State, observe=observe, score=score):
        "Evicts by the time of last use."


    POLICY = Own
"""

FORECAST = """
    from dataclasses import dataclass
    from typing import NamedTuple

    from hotset.forecasts import Forecast
    from hotset.forecasts.base import compiled
    from hotset.policies import Grid


    class State(NamedTuple):
        used: Grid


    @compiled
    def observe(state, seen):
        state.used[seen.layer, :] = 0.0
        for expert in seen.experts:
            state.used[seen.layer, expert] = 1.0


    @compiled
    def probabilities(state, seen, target, distance, out):
        for expert in range(len(out)):
            out[expert] = PROBABILITY * state.used[target, expert]


    @dataclass(frozen=True, kw_only=True)
    class Same(Forecast, name="NAME", state=State, observe=observe, probabilities=probabilities):
        "The experts of the token before."


    FORECAST = Same
"""


def write(path, text, **words):
    text = dedent(text)
    for key, value in words.items():
        text = text.replace(key, value)
    path.write_text(text)
    return path


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """Nothing of a test is known to the next."""
    yield
    for kind, package in plugins.PACKAGES.items():
        for name in plugins.registered(kind):
            sys.modules.pop(f"{package}.{name}", None)
        plugins._files[kind].clear()
    plugins._entries.cache_clear()


@pytest.fixture
def mru(tmp_path):
    return write(tmp_path / "mru.py", POLICY, NAME="mru", SCORE="-state.last[layer, expert]")


def test_a_file_is_a_policy(mru, monkeypatch):
    monkeypatch.chdir(mru.parent)
    result = simulate({"it": trace("it")}, Sweep(policies=["./mru.py", "mru.py:admit=score"], budgets=["25%"], fit=0))
    assert {row.policy for row in result.rows} == {"mru", "mru:admit=score", "belady"}
    assert "mru" in hotset.policies.names()
    assert hotset.policies.parse("mru:admit=late").spec == "mru:admit=late"
    assert RunOptions(policy="./mru.py:admit=score").policy == "mru:admit=score"
    assert RunOptions(host_policy=str(mru)).host_policy == "mru"


def test_a_policy_of_a_file_does_what_it_says(mru):
    """With LRU's score it is LRU, hit by hit."""
    write(mru, POLICY, NAME="same-as-lru", SCORE="state.last[layer, expert]")
    rows = simulate({"it": trace("it")}, Sweep(policies=["lru", str(mru)], budgets=["25%"], fit=0)).rows
    hits = {(row.policy, row.phase): row.hits for row in rows}
    assert hits["lru", "decode"] == hits["same-as-lru", "decode"]


def test_all_policies_are_compared_where_none_is_named(mru):
    plugins.load_file(mru, "policy")
    rows = simulate({"it": trace("it")}, Sweep(budgets=["25%"])).rows
    assert {row.policy for row in rows} == set(hotset.policies.names())
    assert [row.policy for row in rows if row.phase == "decode" and row.start == "warm"][-2:] == ["mru", "belady"]


def test_a_file_that_changes_is_read_again(mru):
    assert plugins.load_file(mru, "policy") == "mru"
    before = hotset.policies.parse("mru")
    assert type(hotset.policies.parse(plugins.resolve(str(mru)))) is type(before)
    write(mru, POLICY, NAME="mru", SCORE="state.last[layer, expert]")
    assert type(hotset.policies.parse(plugins.resolve(str(mru)))) is not type(before)


def test_a_file_is_a_forecast(tmp_path):
    path = write(tmp_path / "same.py", FORECAST, NAME="same", PROBABILITY="0.6")
    (score,) = evaluate(trace("it"), [str(path)], (1,)).scores
    assert score.forecast == "same"
    assert 0 < score.recall < 1
    assert "same" in hotset.forecasts.names()
    assert RunOptions(prefetch=str(path)).prefetch == "same"


@pytest.fixture
def installed(tmp_path, monkeypatch, mru):
    """A package with entry points, as pip would have installed it."""
    write(tmp_path / "their_policies.py", POLICY, NAME="theirs", SCORE="state.last[layer, expert]")
    write(tmp_path / "their_forecast.py", FORECAST, NAME="theirs", PROBABILITY="0.5")
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    groups = [
        "[hotset.policies]", "theirs = their_policies:Own", "broken = their_missing", "othername = their_policies",
        "lru = their_policies", "nothing = json", "[hotset.forecasts]", "theirs = their_forecast",
    ]  # fmt: skip
    (info / "entry_points.txt").write_text("\n".join(groups) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins._entries.cache_clear()
    yield
    for name in ("their_policies", "their_forecast"):
        sys.modules.pop(name, None)


def test_entry_points(installed):
    rows = simulate({"it": trace("it")}, Sweep(policies=["theirs", "lru"], budgets=["25%"], fit=0)).rows
    hits = {(row.policy, row.phase): row.hits for row in rows}
    assert hits["theirs", "decode"] == hits["lru", "decode"]
    assert [score.forecast for score in evaluate(trace("it"), ["theirs"], (1,)).scores] == ["theirs"]
    assert type(hotset.policies.parse("lru")).__module__ == "hotset.policies.lru"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", r"the entry point broken \(their_missing\) does not work: ModuleNotFoundError"),
        ("othername", 'is of a policy called "theirs": the two names must be the same'),
        ("nothing", "does not define POLICY, a class that derives from Policy"),
    ],
)
def test_entry_points_that_do_not_work(installed, name, message):
    with pytest.raises(PolicyError, match=message):
        Sweep(policies=[name]).asked_for()


def test_a_comparison_of_all_leaves_out_what_does_not_work_and_says_so(installed):
    result = simulate({"it": trace("it")}, Sweep(budgets=["25%"], fit=0))
    assert "theirs" in {row.policy for row in result.rows}
    assert [line.split(" is left out")[0] for line in result.notes if "left out" in line] == [
        "broken",
        "nothing",
        "othername",
    ]


@pytest.mark.parametrize(
    ("score", "line", "why"),
    [
        ('{"a": 1}["a"]', 'Numba cannot compile "return {"a": 1}["a"]"', "hash"),
        ("state.lost[layer, expert]", 'cannot compile "return state.lost[layer, expert]"', "Unknown attribute 'lost'"),
        ("foo(3)", 'cannot compile "def score(', "NameError: name 'foo' is not defined"),
        ("[x for x in range(3)][0]", 'cannot compile "return [x for x in range(3)][0]"', "NRT required"),
    ],
)
def test_what_numba_refuses_is_told_in_a_line_with_its_place(tmp_path, score, line, why):
    path = write(tmp_path / "own.py", POLICY, NAME="own", SCORE=score)
    number = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "SCORE" in text or score in text)
    with pytest.raises(PolicyError, match=re.escape("docs/guide/own-policy.md")) as refused:
        check_policy(str(path))
    told = str(refused.value)
    assert told.startswith(f"{path}, line {number if 'return' in line else number - 1}: ")
    assert line in told
    assert why in told
    assert len(told) < 600
    with pytest.raises(NumbaError) as raised:
        ahead.compile_part(ahead.Part("replay", str(path)))
    assert run_and_report(lambda: (_ for _ in ()).throw(raised.value)) == 2


def test_errors_that_are_none_of_a_user_are_left_as_they_are():
    assert plugins.uncompilable(ValueError("own.py")) is None
    assert plugins.uncompilable(NumbaError('File "/no/such.py", line 3:')) is not None
    assert plugins.uncompilable(NumbaError(f"During: typing of call at {plugins.__file__} (3)")) is None
    assert plugins.uncompilable(NumbaError("it failed")) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "own.py does not work: ZeroDivisionError: division by zero"),
        ("import", "own.py does not work: SyntaxError"),
        ("raise SystemExit", None),
        ("x = 3", "own.py does not define POLICY, a class that derives from Policy"),
        ("POLICY = dict", "does not define POLICY"),
        ("from hotset.policies import Policy as POLICY", "has no name of letters"),
        ("from hotset.policies.lru import POLICY", 'defines a policy called "lru", which there is already'),
    ],
)
def test_files_that_do_not_work(tmp_path, text, message):
    path = tmp_path / "own.py"
    path.write_text(text)
    with pytest.raises(SystemExit if message is None else PolicyError, match=message) as caught:
        RunOptions(policy=str(path))
    assert "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(PolicyError, match=r"there is no file .*none.py: name one that defines POLICY"):
        Sweep(policies=[str(tmp_path / "none.py")])
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(PolicyError, match="cannot read"):
        Sweep(policies=[str(tmp_path / "folder.py")])


def test_a_file_of_options_runs_no_code(mru, tmp_path):
    (tmp_path / "hotset.toml").write_text(f'policy = "{mru}"\n')
    with pytest.raises(HotsetError, match="a file of options runs no code: give --policy"):
        read_options(tmp_path / "hotset.toml")
    assert "mru" not in hotset.policies.names()


def test_the_contract_can_be_called_on_ones_own(mru, tmp_path):
    check_policy(str(mru))
    check_policy("lru")
    check_forecast(str(write(tmp_path / "same.py", FORECAST, NAME="same", PROBABILITY="0.6")))


def test_the_contract_says_what_does_not_hold(tmp_path):
    text = dedent(POLICY).replace(
        "for expert in event.experts:", "table.resident[event.layer] += 1\n    for expert in event.experts:"
    )
    with pytest.raises(ContractError, match=r"the table miscounts its residents|slot"):
        check_policy(str(write(tmp_path / "own.py", text, NAME="writes", SCORE="state.last[layer, expert]")))
    never = write(tmp_path / "never.py", POLICY, NAME="never", SCORE="state.last[layer, expert] * float('nan')")
    never.write_text(
        never.read_text().replace("float('nan')", "nan").replace("from typing", "from math import nan\nfrom typing", 1)
    )
    with pytest.raises(ContractError, match=r"score is not a number \(nan\) for expert \d"):
        check_policy(str(never))
    path = write(tmp_path / "much.py", FORECAST, NAME="much", PROBABILITY="1.5")
    with pytest.raises(ContractError, match="a probability is not a number from 0 to 1"):
        check_forecast(str(path))
    with pytest.raises(PolicyError, match="a policy must be a Policy, not 3"):
        check_policy(3)


def test_the_example_and_the_page_keep_the_contract(tmp_path):
    check_policy(str(OWN))
    page = (OWN.parents[1] / "docs/guide/own-policy.md").read_text(encoding="utf-8")
    (tmp_path / "page.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    check_policy(str(tmp_path / "page.py"))
    assert "mru" in hotset.policies.names()
