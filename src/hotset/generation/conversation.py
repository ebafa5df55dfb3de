"""A conversation with a model: its turns, and the key-value cache that they share as far as they agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotset.generation.answer import Answer, generate
from hotset.generation.prefix_cache import PrefixCache
from hotset.generation.prompts import encode_messages, encode_plain, system_messages, wants_template
from hotset.generation.sampling import MAX_SEED, Sampling
from hotset.generation.stopping import Stop
from hotset.generation.streaming import OnText
from hotset.generation.templates import Messages
from hotset.generation.text_model import TextModel


class Conversation:
    """Turns so far; each new one goes on from all of them."""

    def __init__(
        self,
        text_model: TextModel,
        sampling: Sampling | None = None,
        use_template: bool | None = None,
        cache: PrefixCache | None = None,
    ) -> None:
        self.text_model, self.sampling = text_model, sampling or Sampling()
        self.template = wants_template(text_model, use_template)
        self._system = system_messages(text_model, self.sampling.system, self.template)
        self.messages: Messages = [*self._system]
        self.turns = 0  # so far, for the seed of each
        self._cache = cache or PrefixCache.of(text_model.model)

    @property
    def reused_tokens(self) -> int:
        """How many tokens of the last turn were known from those before."""
        return self._cache.reused_tokens

    def reset(self) -> None:
        """Forget all turns, but not the system message."""
        self.messages = [*self._system]
        self._cache.clear()

    def send(self, text: str, on_text: OnText = lambda _: None, *, stop: Stop | None = None) -> Answer:
        """Answer one turn; a turn without an answer is as if it had not been."""
        turn = {"role": "user", "content": text}
        ids = self._encode([*self.messages, turn])
        room = self.text_model.max_new_tokens_for(ids.shape[1], self.sampling.max_new_tokens)
        cache = self._cache.acquire(ids[0].tolist(), room)
        answer = generate(self.text_model, ids, self._turn_sampling(), on_text, stop=stop, cache=cache)
        self.turns += 1
        if answer.new_ids:
            self.messages += [turn, {"role": "assistant", "content": answer.text}]
        self._cache.release(cache, answer.cached_ids)
        return answer

    def _turn_sampling(self) -> Sampling:
        """Each turn draws with a seed of its own, the first with the one that was given."""
        seed = self.sampling.seed
        return self.sampling if seed is None else replace(self.sampling, seed=(seed + self.turns) % (MAX_SEED + 1))

    def _encode(self, messages: Messages) -> Any:
        if self.template:
            return encode_messages(self.text_model, messages)
        return encode_plain(self.text_model, "\n".join(message["content"] for message in messages))
