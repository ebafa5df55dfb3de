"""A conversation with a model: its turns, and the key-value cache that they share as far as they agree."""

from __future__ import annotations

from typing import Any

from hotset.cli.generate import Answer, Sampling, generate
from hotset.cli.loading import Loaded
from hotset.cli.prompts import Messages, encode_messages, encode_plain, wants_template
from hotset.cli.streaming import Write


class Conversation:
    """Turns so far; each new one goes on from all of them."""

    def __init__(self, loaded: Loaded, sampling: Sampling, use_template: bool | None = None) -> None:
        self.loaded, self.sampling = loaded, sampling
        self.template = wants_template(loaded, use_template)
        self.messages: Messages = []
        self.reused_tokens = 0
        self._cache: Any = None
        self._cached: list[int] = []

    def reset(self) -> None:
        """Forget all turns."""
        self.messages, self._cache, self._cached = [], None, []

    def say(self, text: str, write: Write) -> Answer:
        """Answer one turn; a turn without an answer is as if it had not been."""
        turn = {"role": "user", "content": text}
        ids = self._encode([*self.messages, turn])
        cache = self._cache_for(ids[0].tolist())
        self._cache, self._cached = None, []  # whatever goes wrong, a cache in an unknown state is not used again
        answer = generate(self.loaded, ids, self.sampling, write, cache)
        if answer.new_ids:
            self.messages += [turn, {"role": "assistant", "content": answer.text}]
        if answer.cached_ids:
            self._cache, self._cached = cache, answer.cached_ids
        return answer

    def _encode(self, messages: Messages) -> Any:
        if self.template:
            return encode_messages(self.loaded, messages)
        return encode_plain(self.loaded, "\n".join(message["content"] for message in messages))

    def _cache_for(self, ids: list[int]) -> Any:
        """The cache of earlier turns, cut to what this turn begins with, or a fresh one.

        Templates rewrite history, and a text may be read back as other tokens than it was written with.
        """
        from transformers import DynamicCache

        shared = _shared(self._cached, ids[:-1])  # the last token must be computed to say what follows
        surplus = len(self._cached) - shared
        if shared and (surplus == 0 or _can_be_cut(self._cache)):
            if surplus:
                self._cache.crop(-surplus)
            self.reused_tokens = shared
            return self._cache
        self.reused_tokens = 0
        return DynamicCache(config=self.loaded.model.config)


def _shared(one: list[int], other: list[int]) -> int:
    """How many tokens two sequences begin with alike."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def _can_be_cut(cache: Any) -> bool:
    """Whether tokens can be taken off the end: windows and states that forget cannot be rolled back."""
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in cache.layers)
