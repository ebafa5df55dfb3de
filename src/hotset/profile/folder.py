"""Where profiles live: names lead to a folder of the user's own, paths to themselves."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hotset.errors import HotsetError, ProfileError
from hotset.files import check_place

SUFFIX = ".safetensors"
_NAME = re.compile(r"[\w][\w.+-]{0,99}")


def folder() -> Path:
    """The folder of named profiles, by the XDG rules."""
    home = os.environ.get("XDG_DATA_HOME", "")
    base = Path(home) if home and Path(home).is_absolute() else _expanded(Path("~/.local/share"))
    return base / "hotset" / "profiles"


def locate(name: str) -> Path:
    """The file of a profile: a path if it looks like one, else a name in the folder."""
    if "/" in name or "\\" in name or name.endswith(SUFFIX):
        return _expanded(Path(name))
    if not _NAME.fullmatch(name):
        raise ProfileError(f"{name!r} is no name for a profile: use letters, digits, dots and dashes, or give a path")
    return folder() / f"{name}{SUFFIX}"


def make_room(path: Path) -> None:
    """Create the folder of named profiles, if that is where the path leads."""
    if path.parent != folder():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProfileError(
            f"cannot make the folder {path.parent} ({error.strerror or error}): set XDG_DATA_HOME, or give a path"
        ) from error


def known() -> dict[str, Path]:
    """All named profiles."""
    try:
        names = sorted(name for name in os.listdir(folder()) if name.endswith(SUFFIX))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ProfileError(
            f"cannot read the folder {folder()} ({error.strerror or error}): set XDG_DATA_HOME to another one"
        ) from error
    return {name.removesuffix(SUFFIX): folder() / name for name in names}


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:
        raise ProfileError(f"{path} is in no home folder that is known: give the path without ~") from None


def check_writable(path: Path) -> None:
    """Refuse a place where no profile can be written, before the work and not after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_place(path)
        lock_of(path).open("a").close()  # the file that locks it must be ours, too
    except OSError as error:
        raise ProfileError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
    except HotsetError as error:
        raise ProfileError(str(error)) from error


def lock_of(path: Path) -> Path:
    """The file that is locked while a profile is written."""
    return path.with_name(f".{path.name}.lock")
