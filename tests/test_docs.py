"""The documents: every link leads somewhere, every command has the options that are shown, README is short."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hotset.cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/*.md", "recipes/**/*.md")
    for page in ROOT.glob(pattern)
)
README_WORDS = 900
OUTSIDE = ("http://", "https://", "mailto:")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def lines_of(page: Path, *, code: bool) -> Iterator[str]:
    """The lines inside of code blocks, or those outside."""
    inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            inside = not inside
        elif inside == code:
            yield line


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


@cache
def anchors_of(page: Path) -> frozenset[str]:
    found: list[str] = []
    for line in lines_of(page, code=False):
        heading = re.match(r"#{1,6} (.*)", line)
        if heading:
            name = slug(heading[1])
            found.append(f"{name}-{found.count(name)}" if name in found else name)
    return frozenset(found)


def broken_links(page: Path) -> Iterator[str]:
    text = "\n".join(re.sub(r"`[^`]*`", "", line) for line in lines_of(page, code=False))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(OUTSIDE):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or not there.is_relative_to(ROOT):
            yield f"{target}: there is no such file"
        elif anchor and anchor not in anchors_of(there):
            yield f"{target}: no such heading; there are {', '.join(sorted(anchors_of(there)))}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    assert not list(broken_links(page))


def test_pages_are_listed() -> None:
    """The index of docs/ names every page."""
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert not {page for page in pages if f"({page})" not in index}


def test_readme_is_short_and_begins_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= README_WORDS
    commands = [line.split("#")[0].strip() for line in lines_of(ROOT / "README.md", code=True)]
    assert commands[:2] == ["make demo", "make test"]
    assert text.index("make demo") < 40


def commands_of(page: Path) -> list[list[str]]:
    """The words of every `hotset ...` line in the code blocks of a page."""
    return [
        shlex.split(line, comments=True)[1:] for line in lines_of(page, code=True) if re.match(r"\s*hotset [a-z]", line)
    ]


COMMANDS = [(named(page), words) for page in PAGES for words in commands_of(page)]


IDS = [f"{page}:{' '.join(words)[:60]}" for page, words in COMMANDS]


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=IDS)
def test_commands_have_the_options_shown(page: str, words: list[str]) -> None:
    command, name = typer.main.get_command(app), []
    while hasattr(command, "commands"):
        name.append(words[len(name)])
        command = command.commands[name[-1]]
    current = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]  # not deprecated
    known = {option for parameter in current for option in (*parameter.opts, *parameter.secondary_opts)}
    used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert used <= known | {"--help"}, page


def test_help_of_the_commands_in_readme_works() -> None:
    groups = {"trace", "profile"}
    for words in {tuple(words[: 2 if words[0] in groups else 1]) for words in commands_of(ROOT / "README.md")}:
        assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0, words


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_in_code_blocks_compiles_and_imports_what_is_there(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        for node in ast.walk(ast.parse(block, named(page))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hotset"):
                module = importlib.import_module(node.module or "")
                assert not [name.name for name in node.names if not hasattr(module, name.name)]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_named_scripts_exist(page: Path) -> None:
    """Benchmarks, tests and examples that a page names by their path are there; the log speaks of its day."""
    text = page.read_text(encoding="utf-8") if page.name not in ("log.md", "CHANGELOG.md") else ""
    paths = re.findall(r"(?<![\w/.])(?:benchmarks|tests|examples|recipes)/[\w/.]*\.(?:py|json|md)\b", text)
    assert not {path for path in paths if "NAME" not in path and not (ROOT / path).exists()}


def test_every_benchmark_is_listed() -> None:
    text = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    scripts = [path.name for path in (ROOT / "benchmarks").rglob("*.py")]
    results = [path.name for path in (ROOT / "benchmarks/results").glob("*.json") if not path.name.startswith("study_")]
    assert not [name for name in (*scripts, *results) if name not in text]
