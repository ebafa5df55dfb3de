"""Mutated small files of a model's folder: structure-aware for JSON, hostile templates, and bytes changed in all."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUMBERS = (0, -1, 1, 2, 3, 7, 10**4, 2**31 - 1, 2**31, 2**63, 10**9, 10**12, 10**30, -(10**9), 0.5, 1e308, -1e-320)
WORDS = (
    "",
    "x",
    "auto",
    "../../etc/passwd",
    "\x1b[31mred\x1b[0m",
    "[bold]bold[/nothing]",
    "\ud800",
    "\u202e\x00",
    "é" * 50,
)
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    {"a": {}},
    [None],
    [1, 2, 3],
    {"": ""},
    float("nan"),
    float("inf"),
)
HOSTILE = json.loads(Path(__file__).with_name("hostile.json").read_text())
EXTRA: dict[str, dict[str, Any]] = HOSTILE["extra"]
"""Keys that the libraries obey, with values that are right, odd or wrong."""
TEMPLATES: list[str] = HOSTILE["templates"]
CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nBe kind<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def mutate(name: str, original: bytes, rng: random.Random) -> bytes:
    """A mutated version of a file; the same for the same state of the generator."""
    if name.endswith(".jinja"):
        return _template(rng)
    if rng.random() < 0.12:
        return _bytes(original, rng)
    document = json.loads(original)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        document = _json(name, document, rng)
    if rng.random() < 0.02:
        return _deep(rng)
    return json.dumps(document).encode()


def _json(name: str, document: Any, rng: random.Random) -> Any:
    if rng.random() < 0.03:
        return rng.choice((*OTHERS, *WORDS, *NUMBERS))
    extra = EXTRA.get(name)
    if extra and isinstance(document, dict) and rng.random() < 0.45:
        key = rng.choice(sorted(extra))
        return document | {key: rng.choice(extra[key])}
    place, key = _pick(document, rng)
    if key is None:
        return document
    rng.choice(_CHANGES)(place, key, rng)
    return document


def _pick(document: Any, rng: random.Random) -> tuple[Any, Any]:
    """A place in the document: a container and one of its keys, few steps down."""
    place: Any = document
    while isinstance(place, dict | list) and place:
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        below = place[key]
        if not isinstance(below, dict | list) or not below or rng.random() < 0.35:
            return place, key
        place = below
    return place, None


def _value(place: Any, key: Any, rng: random.Random) -> None:
    place[key] = rng.choice((*NUMBERS, *WORDS, *OTHERS))


def _number(place: Any, key: Any, rng: random.Random) -> None:
    place[key] = rng.choice(NUMBERS)


def _type(place: Any, key: Any, rng: random.Random) -> None:  # noqa: ARG001
    value = place[key]
    place[key] = [value] if isinstance(value, str) else {"value": value} if isinstance(value, list) else str(value)


def _delete(place: Any, key: Any, rng: random.Random) -> None:  # noqa: ARG001
    del place[key]


def _rename(place: Any, key: Any, rng: random.Random) -> None:
    if isinstance(place, dict):
        place[rng.choice(WORDS) + key] = place.pop(key)


def _nest(place: Any, key: Any, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 3, 200))):
        place[key] = [place[key]] if rng.random() < 0.5 else {"x": place[key]}


def _swap(place: Any, key: Any, rng: random.Random) -> None:
    other = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
    place[key], place[other] = place[other], place[key]


_CHANGES: tuple[Callable[[Any, Any, random.Random], None], ...] = (
    _value, _value, _value, _number, _number, _type, _delete, _rename, _nest, _swap,
)  # fmt: skip


def _deep(rng: random.Random) -> bytes:
    depth = rng.choice((500, 5000, 200_000))
    return rng.choice((b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth))


def _bytes(original: bytes, rng: random.Random) -> bytes:
    way, where = rng.randrange(7), rng.randrange(max(len(original), 1))
    if way == 0:
        return original[:where]
    if way == 1:
        return b""
    if way == 2:
        return b"\xef\xbb\xbf" + original
    if way == 3:
        return original[:where] + bytes(rng.randrange(256) for _ in range(8)) + original[where + 8 :]
    if way == 4:
        return original + original
    if way == 5:
        return original.decode().encode("utf-16")
    return original[:where] + b"\xff\xfe\x80" + original[where:]


def _template(rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return rng.choice(TEMPLATES).encode("utf-8", "surrogatepass")
    text = list(CHATML)
    for _ in range(rng.choice((1, 2, 5, 20))):
        where = rng.randrange(len(text))
        way = rng.randrange(3)
        text[where] = (
            "" if way == 0 else rng.choice("{}%|'()[]+*~-.0aZ\x1b\n") if way == 1 else text[rng.randrange(len(text))]
        )
    found = "".join(text).encode()
    return _bytes(found, rng) if rng.random() < 0.1 else found
