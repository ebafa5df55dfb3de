"""What a call of generate asks for, as far as it decides about the key-value cache."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor
Values = dict[str, Any]


_DRAFTS = {
    "assistant_model": "an assistant's drafts",
    "prompt_lookup_num_tokens": "drafts by prompt lookup",
    "assistant_early_exit": "drafts by early exit",
    "use_mtp": "drafts by multi-token prediction",
}
"""Options by which tokens are drafted and some of them taken back, and what to call that."""


class GenerateArguments:
    """What a call of generate asks for: by argument, by a configuration of its own, or else by the model's."""

    def __init__(self, args: tuple[Any, ...], kwargs: Values, config: Any) -> None:
        self._kwargs = kwargs
        self._configs = kwargs.get("generation_config"), args[1] if len(args) > 1 else None, config

    def _asked(self, name: str) -> Any:
        given = [self._kwargs.get(name), *(getattr(config, name, None) for config in self._configs)]
        return next((value for value in given if value is not None), None)

    @property
    def reorders_cache(self) -> str | None:
        """What makes it reorder the cache or take tokens back, in words; None if nothing does."""
        if (self._asked("num_beams") or 1) > 1:
            return "beam search"
        return next((what for name, what in _DRAFTS.items() if self._asked(name)), None)

    @property
    def other_cache(self) -> bool:
        """Whether it names a cache, wants to keep it, or moves it about."""
        named = self._kwargs.get("past_key_values") is not None or self._asked("cache_implementation") is not None
        kept = self._asked("return_dict_in_generate") or self._asked("use_cache") is False
        return bool(named or kept or self.reorders_cache)

    @property
    def answers(self) -> int:
        """How many answers to each prompt."""
        return int(self._asked("num_return_sequences") or 1)

    def length(self, ids: Tensor) -> int:
        """How many tokens it may come to."""
        new = self._asked("max_new_tokens")
        if new is not None:
            return ids.shape[1] + int(new)
        longest = self._asked("max_length")
        return int(longest) if longest is not None else ids.shape[1] + 20
