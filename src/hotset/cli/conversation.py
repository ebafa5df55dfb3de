"""A conversation with a model: its turns, and the key-value cache that they share as far as they agree."""

from __future__ import annotations

from typing import Any

from hotset.cli.generate import Answer, generate
from hotset.cli.kept_cache import KeptCache, cache_for
from hotset.cli.loading import Loaded
from hotset.cli.prompts import encode_messages, encode_plain, room_for, wants_template
from hotset.cli.streaming import Write
from hotset.cli.templates import Messages
from hotset.generation.sampling import Sampling


class Conversation:
    """Turns so far; each new one goes on from all of them."""

    def __init__(
        self, loaded: Loaded, sampling: Sampling, use_template: bool | None = None, kept: KeptCache | None = None
    ) -> None:
        self.loaded, self.sampling = loaded, sampling
        self.template = wants_template(loaded, use_template)
        self.messages: Messages = []
        self._kept = cache_for(loaded.model) if kept is None else kept

    @property
    def reused_tokens(self) -> int:
        """How many tokens of the last turn were known from those before."""
        return self._kept.reused_tokens

    def reset(self) -> None:
        """Forget all turns."""
        self.messages = []
        self._kept.forget()

    def say(self, text: str, write: Write) -> Answer:
        """Answer one turn; a turn without an answer is as if it had not been."""
        turn = {"role": "user", "content": text}
        ids = self._encode([*self.messages, turn])
        room = room_for(self.loaded, ids.shape[1], self.sampling.max_new_tokens)
        cache = self._kept.lend(ids[0].tolist(), room)
        answer = generate(self.loaded, ids, self.sampling, write, cache)
        if answer.new_ids:
            self.messages += [turn, {"role": "assistant", "content": answer.text}]
        self._kept.take_back(cache, answer.cached_ids)
        return answer

    def _encode(self, messages: Messages) -> Any:
        if self.template:
            return encode_messages(self.loaded, messages)
        return encode_plain(self.loaded, "\n".join(message["content"] for message in messages))
