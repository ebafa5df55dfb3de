"""Text in, text out, for models that run through hotset.

It knows no terminal, no command line and no signals: text goes to a callback, and a `Stop` is given by the caller.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotset.generation.answer import Answer, Finish, generate
    from hotset.generation.conversation import Conversation
    from hotset.generation.prefix_cache import PrefixCache
    from hotset.generation.prompt_files import LabelledPrompt, read_prompts
    from hotset.generation.prompts import encode_messages, encode_plain, encode_prompt
    from hotset.generation.recording import record_prompts
    from hotset.generation.sampling import Sampling
    from hotset.generation.stopping import Stop
    from hotset.generation.text_model import TextModel

_HOMES = {
    "Answer": "answer",
    "Conversation": "conversation",
    "Finish": "answer",
    "LabelledPrompt": "prompt_files",
    "PrefixCache": "prefix_cache",
    "Sampling": "sampling",
    "Stop": "stopping",
    "TextModel": "text_model",
    "encode_messages": "prompts",
    "encode_plain": "prompts",
    "encode_prompt": "prompts",
    "generate": "answer",
    "read_prompts": "prompt_files",
    "record_prompts": "recording",
}

__all__ = [
    "Answer",
    "Conversation",
    "Finish",
    "LabelledPrompt",
    "PrefixCache",
    "Sampling",
    "Stop",
    "TextModel",
    "encode_messages",
    "encode_plain",
    "encode_prompt",
    "generate",
    "read_prompts",
    "record_prompts",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: parsing a command must not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hotset.generation' has no attribute {name!r}")
    return getattr(import_module(f"hotset.generation.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
