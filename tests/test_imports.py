"""Dependencies point one way, and importing hotset costs next to nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hotset

PACKAGE = Path(hotset.__file__).parent

# A room may import from the rooms named, and from itself.
ALLOWED = {
    "_version": set(),
    "__main__": {"cli"},
    "text": set(),
    "errors": {"text"},
    "checks": {"errors"},
    "reading": set(),
    "plain": set(),
    "files": {"errors"},
    "compiling": set(),
    "owner": {"errors"},
    "shape": {"checks", "errors"},
    # Policies and forecasts check their own names, when an option with one is checked.
    "options": {"plugins", "forecasts", "policies", "reading", "checks", "shape", "errors"},
    "trace": {"compiling", "reading", "checks", "shape", "files", "errors"},
    "reference": {"trace", "files", "errors"},
    "policies": {"compiling", "checks", "trace", "shape", "errors"},
    "forecasts": {"checks", "policies", "trace", "shape", "errors"},
    # Found by name when they are asked for, so nothing imports them but what reads names.
    "plugins": {"reading", "errors"},
    "testing": {"cache", "plugins", "forecasts", "policies", "trace", "shape", "checks", "errors"},
    "prefetch": {"checks", "forecasts", "policies", "shape", "errors"},
    "cache": {"compiling", "checks", "options", "forecasts", "profile", "policies", "trace", "shape", "errors"},
    "sim": {
        "compiling",
        "checks",
        "plugins",
        "prefetch",
        "forecasts",
        "cache",
        "profile",
        "policies",
        "trace",
        "shape",
        "errors",
    },
    "profile": {"reading", "checks", "text", "policies", "trace", "shape", "files", "errors"},
    "store": {"reading", "files", "errors"},
    "transfer": {"store", "owner", "trace", "errors"},
    "formats": {"compiling", "store", "checks", "errors"},
    "engine": {
        "formats",
        "transfer",
        "store",
        "owner",
        "prefetch",
        "cache",
        "forecasts",
        "profile",
        "policies",
        "trace",
        "shape",
        "text",
        "errors",
    },
    "models": {
        "engine",
        "formats",
        "options",
        "compiling",
        "reading",
        "text",
        "report",
        "transfer",
        "store",
        "owner",
        "prefetch",
        "cache",
        "forecasts",
        "profile",
        "policies",
        "trace",
        "shape",
        "files",
        "errors",
    },
    "report": {"checks", "text", "forecasts", "sim", "cache", "profile", "trace", "shape", "files", "errors"},
    # What is compiled ahead is of all packages that compile.
    "ahead": {
        "analysis",
        "compiling",
        "engine",
        "formats",
        "sim",
        "store",
        "cache",
        "prefetch",
        "plugins",
        "forecasts",
        "policies",
        "trace",
        "shape",
    },
    "generation": {
        "cache",
        "files",
        "store",
        "compiling",
        "engine",
        "text",
        "reading",
        "reference",
        "models",
        "options",
        "profile",
        "trace",
        "shape",
        "errors",
    },
    "cli": {
        "ahead",
        "compiling",
        "generation",
        "options",
        "text",
        "plain",
        "reading",
        "reference",
        "report",
        "models",
        "engine",
        "transfer",
        "store",
        "sim",
        "plugins",
        "prefetch",
        "cache",
        "forecasts",
        "profile",
        "policies",
        "trace",
        "shape",
        "files",
        "errors",
        "_version",
    },
}
ALLOWED["analysis"] = set(ALLOWED) - {"cli", "__main__", "_version"}  # studies all that is below the command line
ALLOWED["cli"].add("analysis")

# Torch is for those who compute; everything before them runs without it.
TORCH = {"analysis", "generation", "formats", "engine", "models", "reference", "cli"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    named = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return named | {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}


def imported_rooms(modules: set[str]) -> set[str]:
    named = {module.split(".")[1] for module in modules if module.startswith("hotset.")}
    return named | {""} if "hotset" in modules else named


@pytest.fixture(scope="module")
def imports() -> dict[Path, set[str]]:
    """What each file imports; the package's own door to all rooms, opened lazily, is left out."""
    return {path: imported_modules(path) for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"}


def test_every_room_is_known(imports: dict[Path, set[str]]) -> None:
    assert {room_of(path) for path in imports} <= set(ALLOWED), "a new room: say in this test what it may import"


def test_dependencies_point_one_way(imports: dict[Path, set[str]]) -> None:
    wrong = {
        str(path.relative_to(PACKAGE)): rooms - {room_of(path)} - ALLOWED[room_of(path)]
        for path, modules in imports.items()
        if (rooms := imported_rooms(modules))
    }
    assert not {name: rooms for name, rooms in wrong.items() if rooms}


def test_torch_stays_where_it_belongs(imports: dict[Path, set[str]]) -> None:
    users = {
        path for path, modules in imports.items() if {m.split(".")[0] for m in modules} & {"torch", "transformers"}
    }
    assert users
    assert not {str(path.relative_to(PACKAGE)) for path in users if room_of(path) not in TORCH}


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_import_loads_nothing_heavy() -> None:
    heavy = "['torch', 'transformers', 'numba', 'numpy', 'matplotlib', 'rich', 'typer', 'safetensors']"
    found = run(f"import sys, hotset; print([m for m in {heavy} if m in sys.modules])").stdout
    assert found.strip() == "[]"


def test_help_compiles_nothing() -> None:
    code = (
        "import sys; sys.argv = ['hotset', '--help']\n"
        "from hotset.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('numba', 'numpy', 'torch') if m in sys.modules])"
    )
    assert run(code).stdout.strip().endswith("[]")


def test_every_public_name_resolves() -> None:
    for name in hotset.__all__:
        assert getattr(hotset, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        hotset.nonsense  # noqa: B018
