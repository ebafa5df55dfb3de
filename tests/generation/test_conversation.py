"""Conversations share a key-value cache as far as their turns agree, and say what they would say without it."""

from __future__ import annotations

import pytest

from hotset.errors import HotsetError
from hotset.generation import Conversation, Finish, PrefixCache, Sampling, Stop, TextModel
from hotset.models.static_caches import KVCachePool
from hotset.options import RunOptions

pytestmark = pytest.mark.filterwarnings("default")


def test_a_kept_cache_changes_nothing() -> None:
    with TextModel.load(RunOptions(memory="25%")) as text_model:
        kept = Conversation(text_model, Sampling(max_new_tokens=6), use_template=False)
        for line in ("La funzione calcola", "Il comando apre", "Se l'area non contiene"):
            forgetful = Conversation(text_model, Sampling(max_new_tokens=6), use_template=False)
            forgetful.messages = list(kept.messages)
            answer = kept.send(line)
            assert answer.new_ids == forgetful.send(line).new_ids
        assert kept.reused_tokens > 10


def test_a_cache_of_fixed_size_says_the_same_and_grows_is_cut_and_is_emptied() -> None:
    # In bfloat16 the attention over a longer, masked cache rounds differently, and a near tie goes the other way.
    with TextModel.load(RunOptions(memory="25%", dtype="float32")) as text_model:
        pool, closed = text_model.handle.static_caches, KVCachePool(text_model.model.config)
        assert not pool.is_open
        pool.open()  # as where the device drives
        fixed = PrefixCache.of(text_model.model)
        talks = [
            Conversation(text_model, Sampling(max_new_tokens=6), False, kept)
            for kept in (fixed, PrefixCache(text_model.model.config, closed))
        ]
        caches, texts = [], []
        for line in ("La funzione calcola", "Il comando apre", "cut", "Se l'area " * 160, "reset", "Il mercato del"):
            for talk in talks:
                if line == "reset":
                    talk.reset()
                elif line == "cut":  # the history is another one from here
                    talk.messages[-1]["content"] = "di tutto"
            if line in ("reset", "cut"):
                continue
            answers = [talk.send(line) for talk in talks]
            assert answers[0].new_ids == answers[1].new_ids
            assert answers[0].cached_ids == answers[1].cached_ids
            assert talks[0].reused_tokens == talks[1].reused_tokens
            caches.append(fixed._cache)
            texts.append(talks[0].reused_tokens)
        assert [reused > 0 for reused in texts] == [False, True, True, False]
        assert caches[0] is caches[1]
        assert caches[2] is caches[3]
        assert [cache.layers[0].max_cache_len for cache in caches[1:3]] == [512, 1024]
        pool.close()  # the device has given up: the next turn computes all of it, in a cache of transformers
        answers = [talk.send("E poi?") for talk in talks]
        assert answers[0].new_ids == answers[1].new_ids
        assert [talk.reused_tokens > 0 for talk in talks] == [False, True]
        again = [talk.send("Ancora") for talk in talks]
        assert again[0].new_ids == again[1].new_ids
        assert talks[0].reused_tokens > 0
        assert not pool.is_static(fixed._cache)


def test_a_fixed_cache_that_a_turn_has_left_half_full_is_emptied() -> None:
    with TextModel.load(RunOptions(memory="25%")) as text_model:
        text_model.handle.static_caches.open()  # as where the device drives
        fixed = PrefixCache.of(text_model.model)
        talk = Conversation(text_model, Sampling(max_new_tokens=4), False, fixed)
        first = talk.send("Il mercato del")
        fixed.acquire([1, 2, 3], 4).layers[0].cumulative_length.fill_(2)  # and it never comes back
        talk.messages = []
        assert talk.send("Il mercato del").new_ids == first.new_ids
        assert talk.reused_tokens == 0


def test_a_turn_that_does_not_fit_leaves_the_conversation_as_it_was() -> None:
    with TextModel.load(RunOptions(memory="25%")) as text_model:
        conversation = Conversation(text_model, Sampling(max_new_tokens=4))
        with pytest.raises(HotsetError, match="context is 4,096"):
            conversation.send("x " * 5000)
        assert conversation.messages == []
        assert len(conversation.send("Il mercato").new_ids) == 4


def test_a_turn_that_is_stopped_before_its_first_token_is_as_if_it_had_not_been() -> None:
    with TextModel.load(RunOptions(memory="25%")) as text_model:
        conversation, stop = Conversation(text_model, Sampling(max_new_tokens=4)), Stop()
        first = conversation.send("Il mercato")
        messages = list(conversation.messages)
        stop.ask()
        stopped = conversation.send("E poi?", stop=stop)
        assert (stopped.finish, stopped.new_ids, stopped.cached_ids) == (Finish.INTERRUPT, [], [])
        assert conversation.messages == messages
        conversation.reset()
        assert conversation.send("Il mercato").new_ids == first.new_ids
