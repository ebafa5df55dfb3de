"""Where profiles live: names lead to a folder of the user's own, paths to themselves."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hotset.errors import ProfileError

SUFFIX = ".safetensors"
_NAME = re.compile(r"[\w][\w.+-]{0,99}")


def folder() -> Path:
    """The folder of named profiles, by the XDG rules."""
    home = os.environ.get("XDG_DATA_HOME", "")
    base = Path(home) if home and Path(home).is_absolute() else Path.home() / ".local" / "share"
    return base / "hotset" / "profiles"


def locate(name: str) -> Path:
    """The file of a profile: a path if it looks like one, else a name in the folder."""
    if "/" in name or "\\" in name or name.endswith(SUFFIX):
        return Path(name).expanduser()
    if not _NAME.fullmatch(name):
        raise ProfileError(f"{name!r} is no name for a profile: use letters, digits, dots and dashes, or give a path")
    return folder() / f"{name}{SUFFIX}"


def known() -> dict[str, Path]:
    """All named profiles."""
    return {path.name.removesuffix(SUFFIX): path for path in sorted(folder().glob(f"*{SUFFIX}"))}
