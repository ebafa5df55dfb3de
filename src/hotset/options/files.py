"""`hotset.toml`: a file of options, one key each."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hotset.errors import HotsetError
from hotset.options.declare import Declared, OptionError, Place, declared
from hotset.options.run import RunOptions
from hotset.reading import TooLargeError, read_bounded

CONFIG_NAME = "hotset.toml"
_MAX_BYTES = 1 << 20
_PLUGGED = ("policy", "host_policy", "prefetch")
_CODE = re.compile(r"\.py(:|$)")
"""A file of a user's own code, where a policy or a forecast is named."""


def read_options(path: str | Path, *kinds: Any) -> tuple[dict[str, Any], list[str]]:
    """The options of a file by their names, each checked, and a line for every name of an earlier version."""
    file, kinds = Path(path), kinds or (RunOptions,)
    known = {each.name: each for kind in kinds for each in declared(kind, Place.FILE)}
    old = {name: each for each in known.values() for name in each.option.formerly}
    found: dict[str, Any] = {}
    notes = []
    for key, value in _parsed(file).items():
        if key in old:
            now = old[key]
            notes.append(f"{file}: {now.deprecated(key)}")
            found[now.name] = _checked(file, now, key, value)
        elif key in known:
            found[key] = _checked(file, known[key], key, value)
        else:
            raise HotsetError(f"{file}: {_unknown(key, kinds, known)}")
    return found, notes


def _checked(file: Path, option: Declared, key: str, value: Any) -> Any:
    """The value of a key; paths and names are kept as they are written, and wrong ones are named with their file."""
    if option.name in _PLUGGED and isinstance(value, str) and _CODE.search(value):
        raise HotsetError(
            f"{file}: {key}: a file of options runs no code: give --{option.name.replace('_', '-')} {value} where the "
            "command is typed, or make it known by a name with an entry point"
        )
    try:
        if key != option.name:
            value = option.converted(key, value)
        return option.checked(value)
    except OptionError as error:
        raise HotsetError(f"{file}: {error.spelled(key)}") from None
    except HotsetError as error:
        raise HotsetError(f"{file}: {key}: {error}") from None
    except (TypeError, ValueError):
        raise HotsetError(f"{file}: {key} is not what it should be: see hotset run --help") from None


def _parsed(file: Path) -> dict[str, Any]:
    import tomllib

    try:
        data = b"" if str(file) == os.devnull else read_bounded(file, _MAX_BYTES)
        return tomllib.loads(data.decode("utf-8"))
    except FileNotFoundError:
        raise HotsetError(f"there is no file {file}: give a file of options, such as {CONFIG_NAME}") from None
    except OSError as error:
        raise HotsetError(f"cannot read {file}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise HotsetError(f"{file} is not UTF-8 text (byte {error.start:,}): convert it first") from None
    except TooLargeError as error:
        raise HotsetError(f"{file} is no file of options: {error}") from None
    except (ValueError, RecursionError) as error:  # a number with thousands of digits is no TOMLDecodeError
        raise HotsetError(f'{file} is not TOML: {error}; write lines such as memory = "25%"') from None


def _unknown(key: str, kinds: Iterable[Any], known: dict[str, Declared]) -> str:
    if any(each.name == key for kind in kinds for each in declared(kind)):
        return f"{key} cannot be set in a file: give it where the model is loaded"
    from difflib import get_close_matches

    near = get_close_matches(key.replace("-", "_").lower(), known, n=1)
    hint = f"did you mean {near[0]}?" if near else "hotset run --help lists them all, with _ for - here"
    return f'there is no option "{key:.60}": {hint}'
