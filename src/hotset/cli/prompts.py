"""Prompts as people give them - words, a file, stdin, a conversation - turned into tokens that fit the context."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hotset.cli.faults import translate_errors
from hotset.cli.loading import Loaded
from hotset.cli.templates import Messages, worker
from hotset.errors import HotsetError, ModelError
from hotset.reading import open_regular
from hotset.shape import format_size

MAX_TEXT_BYTES = 256 * 1024**2
_GIVEN = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # pipes that the shell opened, as for --file <(command)


def read_prompt(words: str | None, file: Path | None) -> str:
    """The prompt of the command line or of a file."""
    if words is not None and file is not None:
        raise HotsetError("give the prompt with -p or with --file, not both")
    if words is None and file is None:
        raise HotsetError("no prompt: give one with -p, or with --file (- reads stdin)")
    text = words if file is None else read_text(file)
    if not text or not text.strip():
        raise HotsetError("the prompt is empty: give some words to go on from")
    return text


def read_text(path: Path) -> str:
    """The text of a file, or of stdin for -."""
    try:
        if str(path) == "-":
            return decode(_bounded(sys.stdin.buffer, "stdin"), "stdin")
        with path.open("rb") if str(path).startswith(_GIVEN) else open_regular(path) as file:
            return decode(_bounded(file, str(path)), str(path))
    except OSError as error:
        raise HotsetError(f"cannot read {path}: {error.strerror or error}") from None


def _bounded(file: Any, name: str) -> bytes:
    """All of a file, unless it is larger than any prompts are."""
    data: bytes = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise HotsetError(f"{name} holds more than {format_size(MAX_TEXT_BYTES)}: that is no file of prompts; cut it")
    return data


def decode(data: bytes, name: str) -> str:
    """The text of some bytes; those that are none are named."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise HotsetError(f"{name} is not UTF-8 text (byte {error.start:,}): convert it first") from None


def encode_prompt(loaded: Loaded, text: str, use_template: bool | None = None) -> Any:
    """The tokens of one prompt [1, tokens], in the chat template if the model has one, unless told otherwise."""
    if wants_template(loaded, use_template):
        return encode_messages(loaded, [{"role": "user", "content": text}])
    return encode_plain(loaded, text)


def encode_plain(loaded: Loaded, text: str) -> Any:
    """The tokens of a text as it is."""
    _check_text(text)
    with _tokenising(loaded):
        return _checked(loaded, loaded.tokenizer(text, return_tensors="pt")["input_ids"])


def encode_messages(loaded: Loaded, messages: Messages) -> Any:
    """The tokens of a conversation, as its template lays it out, up to where the model has to speak."""
    for message in messages:
        _check_text(message["content"])
    with _tokenising(loaded):
        if not _renders_jinja(loaded.tokenizer):
            found = loaded.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            return _checked(loaded, found["input_ids"])
        template = loaded.tokenizer.get_chat_template()
        text = worker().render(template, messages, loaded.tokenizer.special_tokens_map)
        found = loaded.tokenizer(text, add_special_tokens=False, return_tensors="pt")
        return _checked(loaded, found["input_ids"])


def _check_text(text: str) -> None:
    """Refuse halves of characters, which arguments, terminals and JSON can hold and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise HotsetError(
            f"the prompt is not UTF-8 text (character {error.start:,}): convert it, or set the terminal to UTF-8"
        ) from None


def _tokenising(loaded: Loaded) -> AbstractContextManager[None]:
    return translate_errors(loaded.place, "use the tokenizer", "check tokenizer.json and tokenizer_config.json")


def _renders_jinja(tokenizer: Any) -> bool:
    """Whether it lays conversations out as transformers does by itself; some have code of their own instead."""
    from transformers import PreTrainedTokenizerBase

    return type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template


def _checked(loaded: Loaded, ids: Any) -> Any:
    """The tokens on the model's device; one that the model has no row for would read beyond its embedding."""
    if ids.shape[-1] == 0:
        raise HotsetError("the prompt has no tokens: give some words to go on from")
    check_ids(loaded, int(ids.min()), int(ids.max()))
    return ids.to(loaded.model.device)


def check_ids(loaded: Loaded, least: int, most: int) -> None:
    """Refuse tokens beyond the embedding."""
    rows = int(loaded.model.get_input_embeddings().weight.shape[0])
    if least < 0 or most >= rows:
        raise ModelError(
            f"the tokenizer of {loaded.place} has token {most if most >= rows else least:,}, and the model {rows:,} "
            "tokens: they are of different models; put the model's own tokenizer beside its weights"
        )


def wants_template(loaded: Loaded, asked: bool | None) -> bool:
    """Whether to use the chat template; asking for one that does not exist is an error."""
    there = bool(getattr(loaded.tokenizer, "chat_template", None))
    if asked and not there:
        raise HotsetError(f"{loaded.options.name} has no chat template: leave --chat out")
    return there if asked is None else asked


def room_for(loaded: Loaded, prompt_tokens: int, wished: int) -> int:
    """How many new tokens fit behind the prompt; a prompt that fills the context is an error."""
    limit = context_tokens(loaded)
    if limit is None:
        return wished
    if prompt_tokens >= limit:
        raise HotsetError(
            f"the prompt has {prompt_tokens:,} tokens and the model's context is {limit:,}: shorten the prompt"
        )
    return min(wished, limit - prompt_tokens)


def context_tokens(loaded: Loaded) -> int | None:
    """The model's context, where its config states it."""
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None
