"""Files of prompts: text with one per line, JSON and JSON lines with labels, or a workload that ships with hotset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any, NamedTuple

from hotset.errors import HotsetError
from hotset.reading import open_regular, parse_bounded
from hotset.shape import format_size

MAX_TEXT_BYTES = 256 * 1024**2
MAX_VALUES = 1 << 22
SHIPPED = "reference:"
"""What names of workloads that ship with hotset begin with."""
_GIVEN = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # pipes that the shell opened, as for --file <(command)
_TEXT_KEYS = ("prompt", "text")


class LabelledPrompt(NamedTuple):
    """One prompt and what is known about it."""

    text: str
    labels: dict[str, str]


def read_prompts(file: str | Path, limit: int | None = None) -> list[LabelledPrompt]:
    """The prompts of a file in their order, at most so many; `reference:it` is a workload that ships with hotset."""
    if str(file).startswith(SHIPPED):
        return _shipped(str(file).removeprefix(SHIPPED))[:limit]
    return parse_prompts(read_text(Path(file)), file, limit)


def parse_prompts(text: str, file: str | Path, limit: int | None = None) -> list[LabelledPrompt]:
    """The prompts of a text that was read from a file of this name."""
    prompts = _parsed(text, Path(file))[:limit]
    if not prompts:
        raise HotsetError(f"{file} holds no prompts: write one per line, or a JSON list")
    return prompts


def read_text(path: Path) -> str:
    """The text of a file."""
    try:
        with path.open("rb") if str(path).startswith(_GIVEN) else open_regular(path) as file:
            return bounded_text(file, str(path))
    except OSError as error:
        raise HotsetError(f"cannot read {path}: {error.strerror or error}") from None


def bounded_text(file: IO[bytes], name: str) -> str:
    """All of an open file as text, unless it is larger than any prompts are."""
    data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise HotsetError(f"{name} holds more than {format_size(MAX_TEXT_BYTES)}: that is no file of prompts; cut it")
    return decode(data, name)


def decode(data: bytes, name: str) -> str:
    """The text of some bytes; those that are none are named."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise HotsetError(f"{name} is not UTF-8 text (byte {error.start:,}): convert it first") from None


def _parsed(text: str, file: Path) -> list[LabelledPrompt]:
    if file.suffix == ".json":
        return [_prompt(file, entry, number) for number, entry in enumerate(_entries(file, _parse(file, text, 1)), 1)]
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if file.suffix == ".jsonl":
        return [_prompt(file, _parse(file, line, number), number) for number, line in lines]
    return [LabelledPrompt(line, {}) for _, line in lines]


def _shipped(name: str) -> list[LabelledPrompt]:
    from hotset.reference import workload

    return [LabelledPrompt(p.text, {"domain": p.domain, "session": p.session}) for p in workload(name).prompts]


def _parse(file: Path, text: str, number: int) -> Any:
    try:
        return parse_bounded(text.encode(), values=MAX_VALUES, containers=MAX_VALUES)
    except (ValueError, RecursionError) as error:
        raise HotsetError(f"{file}, line {number}, is not JSON: {error}") from None


def _entries(file: Path, document: Any) -> list[Any]:
    found = document.get("prompts") if isinstance(document, dict) else document
    if not isinstance(found, list):
        raise HotsetError(f'{file} must hold a list of prompts, or an object with one under "prompts"')
    return found


def _prompt(file: Path, entry: Any, number: int) -> LabelledPrompt:
    values = {"prompt": entry} if isinstance(entry, str) else entry
    key = next((key for key in _TEXT_KEYS if isinstance(values, dict) and isinstance(values.get(key), str)), None)
    if key is None or not values[key].strip():
        raise HotsetError(f'{file}: prompt {number} must be text, or an object with some under "prompt" or "text"')
    labels: dict[str, Any] = {name: value for name, value in values.items() if name != key}
    if isinstance(more := labels.get("labels"), dict):
        labels = {**labels, **more}
    return LabelledPrompt(values[key], {str(n): _word(v) for n, v in labels.items() if not isinstance(v, list | dict)})


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
