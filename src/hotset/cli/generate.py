"""Lets a loaded model write, token by token, and measures the prompt and the answer apart."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from hotset.cli.faults import translate_errors
from hotset.cli.interrupts import Interrupt, Stopped
from hotset.cli.loading import Loaded
from hotset.cli.prompts import room_for
from hotset.cli.streaming import TokenStream, Write
from hotset.generation.sampling import Sampling


@dataclass(frozen=True)
class Answer:
    """What the model wrote, and how long it took."""

    text: str
    prompt_tokens: int
    new_ids: list[int]
    prefill_s: float | None  # up to the first token
    decode_s: float  # from the first to the last
    finish: str  # stop: the model ended; length: as many tokens as allowed; interrupt: Ctrl-C
    cached_ids: list[int] = field(default_factory=list)  # the tokens that the key-value cache holds now

    @property
    def tokens_per_s(self) -> float | None:
        """The speed of the answer without the prompt."""
        return (len(self.new_ids) - 1) / self.decode_s if self.decode_s else None


def generate(
    loaded: Loaded, ids: Any, sampling: Sampling, write: Write, cache: Any = None, interrupt: Interrupt | None = None
) -> Answer:
    """Answer one prompt [1, tokens] and write the text as it comes; a key-value cache of earlier turns is used up.

    An interrupt that is given goes on asking after the answer: for callers that have something to save then.
    """
    if interrupt is None:
        with Interrupt(loaded.model) as mine:
            return generate(loaded, ids, sampling, write, cache, mine)
    import torch
    from transformers import StoppingCriteriaList

    prompt_tokens = int(ids.shape[1])
    room = room_for(loaded, prompt_tokens, sampling.max_new_tokens)
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    with generating(loaded):
        stream = TokenStream(loaded.tokenizer, write, first=lambda: setattr(interrupt, "begun", True))
        began_s = time.perf_counter()
        try:
            loaded.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                **settings(loaded, sampling, room),
                stopping_criteria=StoppingCriteriaList([interrupt.criterion]),
                streamer=stream,
                **_with(cache),
            )
        except Stopped:
            cache = None  # some layers have seen the prompt and some have not
    known = 0 if cache is None else int(cache.get_seq_length())
    return Answer(
        text=loaded.tokenizer.decode(stream.ids, skip_special_tokens=True),
        prompt_tokens=prompt_tokens,
        new_ids=stream.ids,
        prefill_s=stream.times_s[0] - began_s if stream.times_s else None,
        decode_s=stream.times_s[-1] - stream.times_s[0] if stream.times_s else 0.0,
        finish="interrupt" if interrupt.asked else "length" if len(stream.ids) >= room else "stop",
        cached_ids=(ids[0].tolist() + stream.ids)[:known],
    )


def _with(cache: Any) -> dict[str, Any]:
    """How a cache is handed over; transformers would compile the model for one of fixed size."""
    return {} if cache is None else {"past_key_values": cache, "disable_compile": True}


def generating(loaded: Loaded) -> AbstractContextManager[None]:
    """Tell what goes wrong in `generate` in one line: it obeys what the model's folder says."""
    return translate_errors(
        loaded.place, "generate text with the model", "check config.json and generation_config.json"
    )


def settings(loaded: Loaded, sampling: Sampling, room: int) -> dict[str, Any]:
    """What `generate` is told; stop strings of the model's own settings need its tokenizer to be found in tokens."""
    config = generation_config(loaded, sampling, room)
    found: dict[str, Any] = {"generation_config": config}
    return found | ({"tokenizer": loaded.tokenizer} if config.stop_strings else {})


def generation_config(loaded: Loaded, sampling: Sampling, room: int) -> Any:
    """The model's own settings, with what a person asked for in their place."""
    config = deepcopy(loaded.model.generation_config)
    config.max_new_tokens, config.max_length = room, None
    config.num_beams, config.do_sample = 1, sampling.temperature > 0
    config.num_return_sequences, config.return_dict_in_generate = 1, False  # one answer, as tokens
    if config.do_sample:
        config.temperature = sampling.temperature
        config.top_p = config.top_p if sampling.top_p is None else sampling.top_p
    else:
        config.temperature = config.top_p = config.top_k = None
    if config.pad_token_id is None:
        config.pad_token_id = pad_id(loaded)
    return config


def pad_id(loaded: Loaded) -> int:
    """A token to fill rows with; nobody attends to it."""
    for found in (loaded.tokenizer.pad_token_id, *sorted(end_ids(loaded))):
        if found is not None:
            return int(found)
    return 0


def end_ids(loaded: Loaded) -> set[int]:
    """The tokens that end an answer."""
    ends = loaded.model.generation_config.eos_token_id
    if ends is None:
        return set()
    return {ends} if isinstance(ends, int) else set(ends)
