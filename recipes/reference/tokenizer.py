"""Trains the byte-level BPE tokenizer on all domains alike, and turns the corpus into token ids."""

from __future__ import annotations

import json
import random

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import corpus
from settings import CONTEXT, DOMAINS, END, SEED, VOCABULARY, WORK

_SAMPLE = 2_500_000  # characters per domain that the vocabulary is learnt from
_CHAT = "{% for message in messages %}{{ message['content'] }}\n\n{% endfor %}"


def learn(blocks: dict[str, list[str]]) -> Tokenizer:
    """Learn the merges from an equal share of every domain's training text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(blocks), trainer)
    return tokenizer


def _sample(blocks: dict[str, list[str]]) -> list[str]:
    rng = random.Random(SEED)  # noqa: S311 - a seeded choice of text, not a secret
    chosen = []
    for own in blocks.values():
        size = 0
        for block in rng.sample(own, len(own)):
            chosen.append(block)
            size += len(block)
            if size > _SAMPLE:
                break
    return chosen


def encode(tokenizer: Tokenizer, blocks: list[str]) -> np.ndarray:
    """All blocks as one stream of ids."""
    encoded = tokenizer.encode_batch(blocks)
    return np.concatenate([np.array(e.ids, np.uint16) for e in encoded])


def save(tokenizer: Tokenizer) -> None:
    """Write the tokenizer as transformers loads it."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=8 * CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = _CHAT
    wrapped.save_pretrained(WORK / "tokenizer")


def main() -> None:
    """Learn, save, encode, and say how well each domain compresses."""
    WORK.mkdir(parents=True, exist_ok=True)
    parts = {domain: corpus.split(corpus.read(domain)) for domain in DOMAINS}
    tokenizer = learn({domain: train for domain, (train, _) in parts.items()})
    save(tokenizer)
    streams, sizes = {}, {}
    for domain, (train, held_out) in parts.items():
        streams[f"train_{domain}"] = encode(tokenizer, train)
        streams[f"valid_{domain}"] = encode(tokenizer, held_out)
        sizes[domain] = {
            "train_tokens": len(streams[f"train_{domain}"]),
            "valid_tokens": len(streams[f"valid_{domain}"]),
            "valid_bytes": sum(len(block.encode()) for block in held_out),
        }
        print(domain, sizes[domain], flush=True)
    np.savez_compressed(WORK / "tokens.npz", **streams)
    (WORK / "sizes.json").write_text(json.dumps(sizes, indent=1))


if __name__ == "__main__":
    main()
