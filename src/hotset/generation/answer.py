"""Lets a model write, token by token, and measures the prompt and the answer apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hotset.compiling import compile_seconds
from hotset.generation.errors import translate_errors
from hotset.generation.sampling import Sampling, SamplingUsed
from hotset.generation.stopping import Stop, Stopped, watching
from hotset.generation.streaming import OnText, TokenStream
from hotset.generation.text_model import TextModel

Criterion = Callable[[Any, Any], Any]


class Finish(StrEnum):
    """Why an answer ended."""

    STOP = "stop"  # the model ended it
    LENGTH = "length"  # it has as many tokens as allowed
    INTERRUPT = "interrupt"  # the caller asked to stop


@dataclass(frozen=True)
class Answer:
    """What the model wrote, and how long it took."""

    text: str
    prompt_tokens: int
    new_ids: list[int]
    prefill_s: float | None  # up to the first token, without what was compiled
    decode_s: float  # from the first to the last, without what was compiled
    finish: Finish
    sampling: SamplingUsed = field(default_factory=lambda: SamplingUsed(greedy=True, by_model=True))
    cached_ids: list[int] = field(default_factory=list)  # the tokens that the key-value cache holds now

    @property
    def tokens_per_s(self) -> float | None:
        """The speed of the answer without the prompt."""
        return (len(self.new_ids) - 1) / self.decode_s if self.decode_s else None


def generate(
    text_model: TextModel,
    ids: Any,
    sampling: Sampling | None = None,
    on_text: OnText = lambda _: None,
    *,
    stop: Stop | None = None,
    cache: Any = None,
) -> Answer:
    """Answer one prompt [1, tokens]; the text goes to `on_text` as it comes.

    `stop` ends the answer where it is; without a first token there is none. A key-value cache of earlier turns, as
    `PrefixCache` has it, holds the tokens of `Answer.cached_ids` afterwards.
    """
    import torch

    sampling, stop = sampling or Sampling(), stop or Stop()
    room = text_model.max_new_tokens_for(int(ids.shape[1]), sampling.max_new_tokens)
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    with watching(text_model.model, stop) as watch, generating(text_model):
        compiled_s = [compile_seconds()]

        def first() -> None:
            watch.begun = True
            compiled_s.append(compile_seconds())

        stream = TokenStream(text_model.tokenizer, on_text, first=first)
        # transformers would compile the model for a cache of fixed size
        kept = {} if cache is None else {"past_key_values": cache, "disable_compile": True}
        began_s = time.perf_counter()
        try:
            text_model.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                **arguments(text_model, sampling, room, watch.criterion),
                streamer=stream,
                **kept,
            )
        except Stopped:
            cache = None  # some layers have seen the prompt and some have not
    times_s, known = stream.times_s, 0 if cache is None else int(cache.get_seq_length())
    finish = Finish.LENGTH if len(stream.ids) >= room else Finish.STOP
    return Answer(
        text=text_model.tokenizer.decode(stream.ids, skip_special_tokens=True),
        prompt_tokens=int(ids.shape[1]),
        new_ids=stream.ids,
        prefill_s=times_s[0] - began_s - (compiled_s[1] - compiled_s[0]) if times_s else None,
        decode_s=times_s[-1] - times_s[0] - (compile_seconds() - compiled_s[1]) if times_s else 0.0,
        finish=Finish.INTERRUPT if stop.asked else finish,
        sampling=sampling.within(text_model.model.generation_config),
        cached_ids=(ids[0].tolist() + stream.ids)[:known],
    )


def generating(text_model: TextModel) -> AbstractContextManager[None]:
    """Tell what goes wrong in `generate` in one line: it follows what the model's folder says."""
    return translate_errors(
        text_model.place, "generate text with the model", "check config.json and generation_config.json"
    )


def arguments(text_model: TextModel, sampling: Sampling, room: int, criterion: Criterion) -> dict[str, Any]:
    """What transformers' `generate` is told; stop strings of the model's own settings need its tokenizer."""
    from transformers import StoppingCriteriaList

    config = generation_config(text_model, sampling, room)
    found = {"generation_config": config, "stopping_criteria": StoppingCriteriaList([criterion])}
    return found | ({"tokenizer": text_model.tokenizer} if config.stop_strings else {})


def generation_config(text_model: TextModel, sampling: Sampling, room: int) -> Any:
    """The model's own settings, with those of the sampling in their place."""
    config = deepcopy(text_model.model.generation_config)
    used = sampling.within(config)
    config.max_new_tokens, config.max_length = room, None
    config.num_beams, config.do_sample = 1, not used.greedy
    config.num_return_sequences, config.return_dict_in_generate = 1, False  # one answer, as tokens
    config.temperature, config.top_p, config.top_k = used.temperature, used.top_p, used.top_k
    config.min_p, config.repetition_penalty = used.min_p, used.repetition_penalty
    if config.pad_token_id is None:
        config.pad_token_id = pad_id(text_model)
    return config


def pad_id(text_model: TextModel) -> int:
    """A token to fill rows with; attention masks it."""
    for found in (text_model.tokenizer.pad_token_id, *sorted(end_ids(text_model))):
        if found is not None:
            return int(found)
    return 0


def end_ids(text_model: TextModel) -> set[int]:
    """The tokens that end an answer."""
    ends = text_model.model.generation_config.eos_token_id
    if ends is None:
        return set()
    return {ends} if isinstance(ends, int) else set(ends)
