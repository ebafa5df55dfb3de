"""Prompts, as text or as a conversation, turned into tokens."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from hotset.errors import HotsetError, ModelError
from hotset.generation.errors import translate_errors
from hotset.generation.templates import Messages, worker
from hotset.generation.text_model import TextModel


def encode_prompt(text_model: TextModel, text: str, use_template: bool | None = None, system: str | None = None) -> Any:
    """The tokens of one prompt [1, tokens], in the chat template if the model has one, unless told otherwise."""
    template = wants_template(text_model, use_template)
    turn = {"role": "user", "content": text}
    before = system_messages(text_model, system, template)
    return encode_messages(text_model, [*before, turn]) if template else encode_plain(text_model, text)


def system_messages(text_model: TextModel, system: str | None, template: bool) -> Messages:
    """The beginning of a conversation; a template that has no place for a system message is an error."""
    if system is None:
        return []
    if not template:
        raise HotsetError("--system is for a chat template, which is not used here: put the words into the prompt")
    first, turn = {"role": "system", "content": system}, {"role": "user", "content": "?"}
    with_it, without = (encode_messages(text_model, messages) for messages in ([first, turn], [turn]))
    if system.strip() and with_it.tolist() == without.tolist():
        raise HotsetError("the model's chat template leaves system messages out: put the words into the prompt")
    return [first]


def encode_plain(text_model: TextModel, text: str) -> Any:
    """The tokens of a text as it is."""
    _check_text(text)
    with _tokenising(text_model):
        return _checked(text_model, text_model.tokenizer(text, return_tensors="pt")["input_ids"])


def encode_messages(text_model: TextModel, messages: Messages) -> Any:
    """The tokens of a conversation, as its template lays it out, up to where the model has to speak."""
    from transformers import PreTrainedTokenizerBase

    for message in messages:
        _check_text(message["content"])
    with _tokenising(text_model):
        if type(text_model.tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
            # It has code of its own to lay conversations out.
            found = text_model.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            return _checked(text_model, found["input_ids"])
        template = text_model.tokenizer.get_chat_template()
        text = worker().render(template, messages, text_model.tokenizer.special_tokens_map)
        found = text_model.tokenizer(text, add_special_tokens=False, return_tensors="pt")
        return _checked(text_model, found["input_ids"])


def _check_text(text: str) -> None:
    """Refuse halves of characters, which arguments, terminals and JSON can hold and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise HotsetError(
            f"the prompt is not UTF-8 text (character {error.start:,}): convert it, or set the terminal to UTF-8"
        ) from None


def _tokenising(text_model: TextModel) -> AbstractContextManager[None]:
    return translate_errors(text_model.place, "use the tokenizer", "check tokenizer.json and tokenizer_config.json")


def _checked(text_model: TextModel, ids: Any) -> Any:
    """The tokens on the model's device; one that the model has no row for would read beyond its embedding."""
    if ids.shape[-1] == 0:
        raise HotsetError("the prompt has no tokens: give some words to go on from")
    check_ids(text_model, int(ids.min()), int(ids.max()))
    return ids.to(text_model.model.device)


def check_ids(text_model: TextModel, least: int, most: int) -> None:
    """Refuse tokens beyond the embedding."""
    rows = int(text_model.model.get_input_embeddings().weight.shape[0])
    if least < 0 or most >= rows:
        raise ModelError(
            f"the tokenizer of {text_model.place} has token {most if most >= rows else least:,}, and the model "
            f"{rows:,} tokens: they are of different models; put the model's own tokenizer beside its weights"
        )


def wants_template(text_model: TextModel, asked: bool | None) -> bool:
    """Whether to use the chat template; asking for one that does not exist is an error."""
    if asked and not text_model.has_template:
        raise HotsetError(f"{text_model.options.name} has no chat template: leave --chat out")
    return text_model.has_template if asked is None else asked
