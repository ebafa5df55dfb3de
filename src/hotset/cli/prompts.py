"""Prompts as people give them - words, a file, stdin, a conversation - turned into tokens that fit the context."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hotset.cli.loading import Loaded, one_line
from hotset.errors import HotsetError, ModelError

Messages = list[dict[str, str]]


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
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise HotsetError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise HotsetError(f"{path} is not UTF-8 text (byte {error.start:,}): convert it first") from None


def encode_prompt(loaded: Loaded, text: str, use_template: bool | None = None) -> Any:
    """The tokens of one prompt [1, tokens], in the chat template if the model has one, unless told otherwise."""
    if wants_template(loaded, use_template):
        return encode_messages(loaded, [{"role": "user", "content": text}])
    return encode_plain(loaded, text)


def encode_plain(loaded: Loaded, text: str) -> Any:
    """The tokens of a text as it is."""
    ids = loaded.tokenizer(text, return_tensors="pt")["input_ids"]
    if ids.shape[-1] == 0:
        raise HotsetError("the prompt has no tokens: give some words to go on from")
    return ids.to(loaded.model.device)


def encode_messages(loaded: Loaded, messages: Messages) -> Any:
    """The tokens of a conversation, as its template lays it out, up to where the model has to speak."""
    import jinja2

    try:
        found = loaded.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise ModelError(f"the chat template does not work ({one_line(error)}): use --no-chat") from error
    return found["input_ids"].to(loaded.model.device)


def wants_template(loaded: Loaded, asked: bool | None) -> bool:
    """Whether to use the chat template; asking for one that does not exist is an error."""
    there = bool(getattr(loaded.tokenizer, "chat_template", None))
    if asked and not there:
        raise HotsetError(f"{loaded.wanted.name} has no chat template: leave --chat out")
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
