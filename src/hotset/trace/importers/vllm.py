"""Importer for what vLLM answers with `--enable-return-routed-experts`: a response, a list of them, or one per line.

vLLM 0.21 gives nested lists, of the prompt in `prompt_routed_experts` of the response and of each answer in
`routed_experts` of its choice; later versions one base64 text per choice, which is a .npy file of prompt and answer.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset.errors import TraceError
from hotset.reading import TooLargeError, lines_of, open_regular, parse_bounded
from hotset.trace.event import Phase
from hotset.trace.importers._archive import parse_array
from hotset.trace.importers._dense import build_dense, expert_ids, join_grids
from hotset.trace.importers._options import ImportOptions
from hotset.trace.trace import NONE, Trace

SUFFIXES = ()  # .json is told by its content
_MAX_VALUES, _MAX_CONTAINERS = 1 << 22, 1 << 17
_MAX_DOCUMENT_BYTES = 256 << 20
_KEYS = (b'"routed_experts"', b'"prompt_routed_experts"', b'"choices"')
_GRID = re.compile(rb'("(?:prompt_)?routed_experts"\s*:\s*)(\[\s*\[\s*\[[-0-9\s,\[\]]*\])')
_GAPS = (b"[]", b"[,", b",]", b",,")  # where numpy would make up a number
_NUMBERS = bytes.maketrans(b"[]", b"  ")

Ids = npt.NDArray[np.int16]


def recognises(head: bytes) -> bool:
    """Whether the first bytes of a file look like responses of vLLM."""
    return head.lstrip()[:1] in (b"{", b"[") and any(key in head for key in _KEYS)


@dataclass
class _Parts:
    """The requests found so far: one for each choice that has routing."""

    grids: list[Ids] = field(default_factory=list)
    phases: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    labels: list[dict[str, str]] = field(default_factory=list)
    model: str | None = None

    def add(self, prompt: Ids, answer: Ids, label: dict[str, str]) -> None:
        """One request; tokens that a prefix cache supplied were not routed, and are marked by -1 throughout."""
        if prompt.shape[1:] != answer.shape[1:]:
            raise TraceError("its prompt and its answers are not of one shape [tokens, layers, top_k]")
        grid = np.concatenate((prompt, answer))
        phase = np.repeat([Phase.PREFILL, Phase.DECODE], [len(prompt), len(answer)]).astype(np.uint8)
        ran = (grid >= 0).any(axis=(1, 2))
        if ran.any():
            self.grids.append(grid[ran])
            self.phases.append(phase[ran])
            self.labels.append(label)


def read(path: Path, options: ImportOptions) -> Trace:
    """Read responses of vLLM; requests are laid end to end, since responses do not say what ran together."""
    parts = _Parts()
    for number, response in enumerate(_responses(path)):
        try:
            _add_response(parts, response)
        except TraceError as error:
            raise TraceError(f"response {number}: {error}") from None
    experts = _without_dense_layers(join_grids(parts.grids, "routed_experts"))
    return build_dense(
        path,
        options,
        experts,
        np.repeat(np.arange(len(parts.grids)), [len(grid) for grid in parts.grids]),
        np.concatenate(parts.phases),
        facts={"model": parts.model},
        labels=tuple(parts.labels),
    )


def _responses(path: Path) -> Iterator[dict[str, Any]]:
    """The responses of a file: one document, or one on each line."""
    for place, text in _texts(path):
        try:
            document = _parse(text)
        except (ValueError, RecursionError) as error:
            why = f": {error}" if isinstance(error, TooLargeError) else ""
            raise TraceError(f"{place} is not valid JSON{why}") from None
        for response in document if isinstance(document, list) else [document]:
            if not isinstance(response, dict):
                raise TraceError("a response of vLLM must be a JSON object with choices")
            yield response


def _texts(path: Path) -> Iterator[tuple[str, bytes]]:
    """The documents of a file as text, and what to call each; a file that is no document is read line by line."""
    with open_regular(path) as file:
        if (size := path.stat().st_size) <= _MAX_DOCUMENT_BYTES:
            data = file.read(size).strip()
            first = data.partition(b"\n")[0].rstrip()
            if first == data or first in (b"{", b"[", b"[{") or not first.endswith(b"}"):
                yield "the file", data
                return
            file.seek(0)
            del data
        for number, line in enumerate(lines_of(file, _MAX_DOCUMENT_BYTES), start=1):
            if len(line) > _MAX_DOCUMENT_BYTES:
                raise TraceError(
                    f"line {number} is longer than {_MAX_DOCUMENT_BYTES:,} bytes: write one response a line"
                )
            if line.strip():
                yield f"line {number}", line


def _parse(text: bytes) -> Any:
    """Parse JSON; nested lists of experts stay text, since Python's lists would take many times the file."""
    grids: dict[str, bytes] = {}

    def set_aside(found: re.Match[bytes]) -> bytes:
        name = f"nested list {len(grids)}"
        grids[name] = found[2]
        return found[1] + b'"' + name.encode() + b'"'

    rest = _GRID.sub(set_aside, text)
    document = parse_bounded(rest, values=_MAX_VALUES, containers=_MAX_CONTAINERS)
    for response in document if isinstance(document, list) else [document]:
        for holder in _holders(response):
            for key in ("routed_experts", "prompt_routed_experts"):
                if isinstance(word := holder.get(key), str):
                    holder[key] = grids.get(word, word)
    return document


def _holders(response: Any) -> list[dict[str, Any]]:
    """The objects of a response that may have routing."""
    if not isinstance(response, dict):
        return []
    choices = response.get("choices")
    return [response, *(each for each in (choices if isinstance(choices, list) else ()) if isinstance(each, dict))]


def _add_response(parts: _Parts, response: dict[str, Any]) -> None:
    choices = response.get("choices")
    if not isinstance(choices, list):
        raise TraceError("it has no list of choices, as responses of vLLM do")
    if isinstance(model := response.get("model"), str):
        parts.model = parts.model or model
    name = response.get("id") or response.get("request_id")
    prompt, first = _grid(response.get("prompt_routed_experts"), "prompt_routed_experts"), True
    for place, choice in enumerate(choices):
        answer = _grid(choice.get("routed_experts") if isinstance(choice, dict) else None, "routed_experts")
        if answer is None:
            continue
        before, after = (prompt, answer) if prompt is not None else _split(answer, response.get("usage"), len(choices))
        label = {"name": name} if isinstance(name, str) else {}
        empty = np.empty((0, *after.shape[1:]), np.int16)
        parts.add(before if first else empty, after, label | ({"choice": str(place)} if len(choices) > 1 else {}))
        first = False  # choices of one prompt share it, and it was computed once
    if first and prompt is not None:
        parts.add(prompt, prompt[:0], {"name": name} if isinstance(name, str) else {})


def _split(grid: Ids, usage: Any, choices: int) -> tuple[Ids, Ids]:
    """Prompt and answer of a grid that may hold both: the response's usage says how long each is."""
    counts = [usage.get(key) if isinstance(usage, dict) else None for key in ("prompt_tokens", "completion_tokens")]
    prompt, answer = (count if type(count) is int and count >= 0 else None for count in counts)
    if prompt is None or answer is None:
        return grid[:0], grid
    if choices > 1:  # usage counts the answers of all choices
        return grid[:prompt], grid[prompt:]
    if len(grid) in (prompt + answer - 1, prompt + answer):  # the last token may not have been computed
        return grid[:prompt], grid[prompt:]
    if len(grid) <= answer:
        return grid[:0], grid
    raise TraceError(
        f"routed_experts holds {len(grid)} tokens, but usage says {prompt} of a prompt and {answer} of an answer: "
        "record without routed_experts_prompt_start, which leaves a part of the prompt out"
    )


def _grid(value: Any, what: str) -> Ids | None:
    if value is None or value == []:
        return None
    if isinstance(value, bytes):
        return expert_ids(_nested(value, what), what)
    if not isinstance(value, str):
        raise TraceError(f"{what} is neither nested lists of whole numbers nor base64 text")
    try:
        data = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise TraceError(f"{what} is not base64 text") from None
    array = parse_array(lambda: io.BytesIO(data), len(data), what)
    return expert_ids(array, what)


def _nested(text: bytes, what: str) -> npt.NDArray[np.int64]:
    """A nested list of numbers as an array: the brackets must be those of a regular one."""
    brackets = text.translate(None, b"0123456789- \t\r\n")
    top_k = brackets.find(b"]") - 2
    layer = brackets[2 : top_k + 3]
    layers = (brackets.find(b"]]") + 2) // (len(layer) + 1) if top_k > 0 else 0
    token = b"[" + b",".join([layer] * layers) + b"]"
    tokens = (len(brackets) - 1) // (len(token) + 1)
    if layers < 1 or brackets != b"[" + b",".join([token] * tokens) + b"]":
        raise TraceError(f"{what} is not nested lists of one shape, [tokens, layers, top_k]")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            values = np.fromstring(text.translate(_NUMBERS), np.int64, sep=",")
    except (ValueError, DeprecationWarning):
        values = np.empty(0, np.int64)
    compact = text.translate(None, b" \t\r\n")
    if len(values) != tokens * layers * top_k or any(gap in compact for gap in _GAPS):
        raise TraceError(f"{what} is not nested lists of whole numbers")
    return values.reshape(tokens, layers, top_k)


def _without_dense_layers(experts: Ids) -> Ids:
    """Layers without experts are zero throughout, as is all that a kernel did not report."""
    if experts.shape[2] > 1:
        experts = experts.copy()
        experts[:, (experts == 0).all(axis=(0, 2))] = NONE
    if not (experts >= 0).any():
        raise TraceError("routed_experts is zero throughout: the kernel that ran in vLLM does not report routing")
    return experts
