"""What replays and packed experts compile is compiled first: with a bar at a terminal, with a line in a pipe, once."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from calls import call

from hotset import ahead
from hotset.cli import compiling
from hotset.cli.compiling import ONCE, compile_first, compile_missing
from hotset.compiling import telling
from hotset.generation import TextModel
from hotset.options import RunOptions

pytestmark = pytest.mark.filterwarnings("default")

NOTE = f"note: {ONCE}"
CURVE, WALK = ahead.Part("curve"), ahead.Part("walk")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[set[ahead.Part]]:
    """Which parts commands ask for; they are compiled as ever."""
    found: list[set[ahead.Part]] = []
    real = ahead.missing

    def missing(parts: list[ahead.Part]) -> list[ahead.Part]:
        found.append(set(parts))
        return real(parts)

    monkeypatch.setattr(ahead, "missing", missing)
    return found


def replays(*policies: str) -> set[ahead.Part]:
    return {ahead.Part("replay", name) for name in policies}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("simulate", "reference:it", "-p", "lfu", "-b", "25%"), replays("lfu", "lru", "belady")),
        (
            ("simulate", "reference:it", "-p", "lru", "-b", "25%", "--link", "1GB/s", "--compute", "4ms",
             "--prefetch", "oracle"),
            replays("lru", "belady") | {ahead.Part("prefetch", "previous")},
        ),
        (("analyze", "reference:it", "-p", "lru"), replays("lru", "belady") | {WALK}),
        (("forecast", "reference:it", "-f", "previous"), {ahead.Part("judge", "previous")}),
        (
            ("plan", "--shape", "qwen3-30b-a3b", "--gpu", "0", "--ram", "32GiB", "--memory-bandwidth", "50GB/s"),
            replays("blend", "lru", "belady"),
        ),
    ],
)  # fmt: skip
def test_commands_compile_what_they_replay(
    words: tuple[str, ...], parts: set[ahead.Part], asked: list[set[ahead.Part]]
) -> None:
    assert call(*words, "--json").code == 0
    assert asked == [parts]


def test_what_is_there_is_not_told_of() -> None:
    words = ("forecast", "reference:it", "-f", "previous")
    call(*words)
    assert NOTE not in call(*words).err


def test_a_figure_needs_the_curve_of_lru(asked: list[set[ahead.Part]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    call("simulate", "reference:it", "-p", "lru", "-b", "25%", "--plot", tmp_path / "hits.svg")
    assert CURVE in asked[0]


def hotset(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, with a folder for compiled code."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "hotset", *words], capture_output=True, text=True, timeout=300,
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder)},
    )  # fmt: skip


def at_terminal(folder: Path, *words: str) -> str:
    """What a command shows at a terminal."""
    child, screen = pty.fork()
    if not child:
        os.environ.update(TERM="xterm", COLUMNS="100", NUMBA_CACHE_DIR=str(folder))
        os.execv(sys.executable, [sys.executable, "-W", "ignore", "-m", "hotset", *words])  # noqa: S606
    text = b""
    try:
        while data := os.read(screen, 1 << 16):
            text += data
    except OSError:  # it has ended
        pass
    os.close(screen)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return text.decode(errors="replace")


def test_a_line_in_a_pipe_and_a_bar_at_a_terminal_and_once(tmp_path: Path) -> None:
    words = ("forecast", "reference:it", "-f", "previous")
    first = hotset(tmp_path / "one", *words, "--json")
    assert first.stderr.splitlines().count(NOTE) == 1
    assert json.loads(first.stdout)
    assert ONCE not in at_terminal(tmp_path / "one", *words)
    shown = at_terminal(tmp_path / "two", *words)
    assert ONCE in shown
    assert NOTE not in shown
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(rf"{ONCE} [^\r\n]* 0/1 0:0\d:(0[1-9]|[1-5]\d)", drawn), drawn  # how long so far
    assert shown.index(ONCE) < shown.index("forecasting") < shown.index("recall @k")


def test_nothing_is_compiled_first_where_all_experts_fit(asked: list[set[ahead.Part]]) -> None:
    """Nor later: tests/test_compiling.py."""
    done = call("run", "-p", "Il mercato", "--max-new-tokens", "2")
    assert done.code == 0, done
    assert NOTE not in done.err
    assert not any(asked)


def test_quiet_says_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ahead, "missing", list)
    assert compile_missing([WALK]) == 1
    assert capsys.readouterr().err == f"{NOTE}\n"
    monkeypatch.setattr("hotset.cli.output.is_quiet", lambda: True)
    assert compile_missing([WALK]) == 1
    assert capsys.readouterr().err == ""


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference model with small experts."""
    folder = tmp_path_factory.mktemp("packs") / "int4"
    from hotset import reference

    assert call("pack", reference.path(), "-o", folder, "--experts", "int4", "--no-quality").code == 0
    return folder


def test_products_of_a_pack_are_compiled_before_it_is_loaded(pack: Path, asked: list[set[ahead.Part]]) -> None:
    (part,) = ahead.parts_of_products(pack)
    assert part == ("products", "integer:short=on 256x32 64x256")
    compile_first(RunOptions(model=str(pack), memory="25%"))
    assert part in asked[0]
    compile_first(RunOptions(model=str(pack), experts="dense"))
    assert part not in asked[1]
    told: list[str] = []
    with telling(lambda: told.append("something is compiled")), TextModel.load(RunOptions(model=str(pack))):
        assert told == []
    assert ahead.parts_of_products(pack.parent) == []


def test_what_is_compiled_while_a_model_loads_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    from numba import njit

    with telling(compiling.say_compiling):
        for add in (1, 2):
            assert njit(lambda x, add=add: x + add)(1) == 1 + add
    njit(lambda x: x + 3)(1)
    assert capsys.readouterr().err == f"{NOTE}\n"
