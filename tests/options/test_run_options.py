"""One declaration of an option is enough: Python, the command line, hotset.toml and the documents derive from it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from options_page import options_page, options_table
from typer.testing import CliRunner

import hotset
from hotset.cli.app import app
from hotset.cli.live import with_options
from hotset.errors import BudgetError, HotsetError, PolicyError
from hotset.generation.sampling import Sampling
from hotset.options import OptionError, Place, RunOptions, declared, option, read_options, takes_options
from hotset.shape import Budget

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "options.md"


@dataclass(frozen=True, kw_only=True)
class More(RunOptions):
    """All options and one more, declared here and nowhere else."""

    sieve_size: int | None = option(None, help="How fine to sieve.", group="Sieves", unit="HOLES", least=2, most=9)


def taken(place: Place) -> Callable[..., Any]:
    @takes_options(More, place)
    def take(model: Any, options: More) -> Any:
        """Take a model."""
        return model, options

    return take


def command(told: list[Any]) -> typer.Typer:
    made = typer.Typer(add_completion=False)

    @made.command()
    @with_options
    def run(options: More, sampling: Sampling = Sampling(max_new_tokens=7), loud: bool = False) -> None:
        told.extend([options, sampling, loud])

    return made


@pytest.mark.parametrize("place", [Place.LOAD, Place.ATTACH])
def test_a_new_option_is_a_keyword_of_load_and_attach(place: Place) -> None:
    take = taken(place)
    found = inspect.signature(take).parameters["sieve_size"]
    assert (found.default, found.annotation, found.kind) == (None, int | None, inspect.Parameter.KEYWORD_ONLY)
    assert "sieve_size: How fine to sieve." in str(take.__doc__)
    assert take("m", sieve_size=3)[1].sieve_size == 3
    with pytest.raises(OptionError, match="sieve_size must be a whole number from 2 to 9, not 1"):
        take("m", sieve_size=1)


def test_a_new_option_is_a_flag_and_a_key_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told: list[Any] = []
    made, file = command(told), tmp_path / "o.toml"
    file.write_text('sieve_size = 4\nmemory = "25%"\nmax_new_tokens = 11\n')
    assert "--sieve-size" in CliRunner().invoke(made, ["--help"]).stdout
    CliRunner().invoke(made, ["--sieve-size", "5"], catch_exceptions=False)
    CliRunner().invoke(made, ["--config", str(file)], catch_exceptions=False)
    CliRunner().invoke(made, ["--config", str(file), "--sieve-size", "6", "--loud"], catch_exceptions=False)
    one, sampling, _, two, filed, quiet, three, _, loud = told
    assert [each.sieve_size for each in (one, two, three)] == [5, 4, 6]
    assert (one.memory, two.memory, three.memory) == ("auto", "25%", "25%")
    assert (sampling.max_new_tokens, filed.max_new_tokens, quiet, loud) == (7, 11, False, True)
    refused = CliRunner().invoke(made, ["--sieve-size", "1"])
    assert str(refused.exception) == "--sieve-size must be a whole number from 2 to 9, not 1"


def test_a_new_option_is_in_the_table_of_the_documents() -> None:
    assert "| `sieve_size` |  | How fine to sieve. | everywhere |" in options_table(More)


def test_the_page_of_the_documents_is_up_to_date() -> None:
    assert PAGE.read_text() == options_page(RunOptions, Sampling), "make options-page writes it anew"


def test_load_and_attach_take_what_applies_to_them() -> None:
    load, attach = (inspect.signature(each).parameters for each in (hotset.load, hotset.attach))
    assert load.keys() - attach.keys() == {
        "device", "dtype", "experts", "trust_remote_code", "auto_class", "from_pretrained", "more",
    }  # fmt: skip
    assert attach.keys() - load.keys() == {"spill"}
    assert load["memory"].default == "auto"
    with pytest.raises(TypeError, match=r"attach\(\) has no option device"):
        hotset.attach(object(), device="cpu")
    with pytest.raises(TypeError, match="by name"):
        hotset.load("m", "25%")  # type: ignore[call-arg,misc]


@pytest.mark.parametrize("words", [["run"], ["chat"], ["trace", "record"]])
def test_every_option_is_a_flag_of_every_command_with_a_model(words: list[str]) -> None:
    made: Any = typer.main.get_command(app)
    for word in words:
        made = made.commands[word]
    flags = {flag for parameter in made.params for flag in parameter.opts}
    for each in declared(RunOptions, Place.COMMAND):
        assert (each.name if each.option.argument else each.flag) in flags
    assert {"--threads", "--host-policy", "--staging", "--config"} <= flags


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ({"memory": "much"}, BudgetError, "cannot read the budget"),
        ({"memory": 3}, OptionError, 'memory must be text such as "25%" or "8GiB", not 3'),
        ({"host_memory": "0%"}, BudgetError, "more than 0 %"),
        ({"policy": "nobody"}, PolicyError, "no policy is called"),
        ({"policy": "belady"}, PolicyError, "needs to know the future"),
        ({"host_policy": "auto"}, PolicyError, "no policy is called"),
        ({"prefetch": "crystal"}, HotsetError, "crystal"),
        ({"scope": "world"}, OptionError, 'scope is one of layer, pool, not "world"'),
        ({"engine": "steam"}, OptionError, "engine is one of auto, host, device"),
        ({"dtype": "int1"}, OptionError, "dtype is one of"),
        ({"context": True}, OptionError, "context must be a whole number"),
        ({"context": 0}, OptionError, "from 1 to"),
        ({"context": 2.5}, OptionError, "context must be a whole number, not 2.5"),
        ({"learn_every": 0}, OptionError, "learn_every must be a number from"),
        ({"learn_every": float("nan")}, OptionError, "not nan"),
        ({"prior_tokens": -1}, OptionError, "prior_tokens must be a whole number from 0"),
        ({"warm_pin": "soon"}, OptionError, "takes a number of tokens, auto or off"),
        ({"warm_pin": -1}, OptionError, "of at least 0"),
        ({"pin": "4GiB"}, HotsetError, "pins are a share"),
        ({"force": "yes"}, OptionError, "force must be true or false"),
        ({"staging": 0}, OptionError, "staging must be a whole number from 1"),
    ],
)
def test_what_an_option_does_not_take_is_refused(values: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        RunOptions(**values)


def test_values_are_kept_as_they_are_meant() -> None:
    some = RunOptions(context=np.int64(12), memory=Budget(slots=3), learn_every=2, policy="auto", warm_pin="12")
    assert (some.context, type(some.context)) == (12, int)
    assert (some.policy_on("cpu"), some.policy_on("cuda"), some.switches_policy) == ("nextuse", "blend", True)
    assert not RunOptions(policy="lru").switches_policy
    assert RunOptions().name == "reference"


def test_names_of_earlier_versions_work_and_say_so(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match=r"learn_every_s is deprecated: use learn_every \(minutes\)") as told:
        assert taken(Place.LOAD)("m", learn_every_s=120)[1].learn_every == 2
    assert told[0].filename == __file__  # the caller's line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert taken(Place.LOAD)("m", learn_every=3)[1].learn_every == 3
    made: list[Any] = []
    done = CliRunner().invoke(command(made), ["--prior", "5", "--new-tokens", "3"], catch_exceptions=False)
    assert (made[0].prior_tokens, made[1].max_new_tokens) == (5, 3)
    assert done.stderr.splitlines() == [
        "note: --prior is deprecated: use --prior-tokens",
        "note: --new-tokens is deprecated: use --max-new-tokens",
    ]
    (tmp_path / "o.toml").write_text("learn_every_s = 30\n")
    values, notes = read_options(tmp_path / "o.toml")
    assert values == {"learn_every": 0.5}
    assert notes == [f"{tmp_path / 'o.toml'}: learn_every_s is deprecated: use learn_every (minutes)"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"memroy = '25%'", 'there is no option "memroy": did you mean memory?'),
        (b"host-memory = '25%'", "did you mean host_memory?"),
        (b"zzz = 1", "hotset run --help lists them all"),
        (b"[run]\nmemory = '25%'", 'there is no option "run"'),
        (b"memory = 3", 'memory must be text such as "25%" or "8GiB", not 3'),
        (b"memory = 'much'", 'memory: cannot read the budget "much"'),
        (b"memory = ['25%']", 'memory must be text such as "25%" or "8GiB", not ['),
        (b"context = '4096'", "context must be a whole number, not '4096'"),
        (b"context = 0", "context must be a whole number from 1 to"),
        (b"policy = 'nobody'", "policy: no policy is called"),
        (b"temperature = -1", "temperature must be a number from 0 to 1,000"),
        (b"learn_every_s = 'often'", "learn_every_s is not what it should be"),
        (b"trust_remote_code = true", "trust_remote_code cannot be set in a file"),
        (b"memory = ", "is not TOML"),
        (b"a = " + b"[" * 100_000, "is not TOML"),
        (b"context = " + b"9" * 5000, "is not TOML"),
        (b"context = 1979-05-27", "context must be a whole number, not datetime.date"),
        (b"memory = '\xff'", "is not UTF-8 text (byte 10)"),
        (b"#" * (1 << 21), "is no file of options"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "o.toml"
    file.write_bytes(content)
    with pytest.raises(HotsetError) as caught:
        read_options(file, RunOptions, Sampling)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_none_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(HotsetError, match="there is no file"):
        read_options(tmp_path / "missing.toml")
    with pytest.raises(HotsetError, match="cannot read"):
        read_options(tmp_path)
    assert read_options("/dev/null") == ({}, [])


def test_a_file_in_the_working_directory_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hotset.toml").write_text('memory = "25%"\n')
    told: list[Any] = []
    found = CliRunner().invoke(command(told), [], catch_exceptions=False)
    without = CliRunner().invoke(command(told), ["--config", "/dev/null"], catch_exceptions=False)
    assert found.stderr.startswith("note: options from hotset.toml in this folder")
    assert without.stderr == ""
    assert (told[0].memory, told[3].memory) == ("25%", "auto")
