"""Files of prompts: text with one per line, JSON and JSON lines with labels, or a workload that ships with hotset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from hotset.cli.prompts import read_text
from hotset.cli.traces import PREFIX
from hotset.errors import HotsetError
from hotset.reading import parse_bounded

MAX_VALUES = 1 << 22
_TEXT_KEYS = ("prompt", "text")


class LabelledPrompt(NamedTuple):
    """One prompt and what is known about it."""

    text: str
    labels: dict[str, str]


def read_prompts(file: Path, limit: int | None = None) -> list[LabelledPrompt]:
    """The prompts of a file in their order, at most so many."""
    prompts = _read(file)[:limit]
    if not prompts:
        raise HotsetError(f"{file} holds no prompts: write one per line, or a JSON list")
    return prompts


def _read(file: Path) -> list[LabelledPrompt]:
    if str(file).startswith(PREFIX):
        return _shipped(str(file).removeprefix(PREFIX))
    text = read_text(file)
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
