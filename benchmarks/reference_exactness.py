"""The reference model through hotset against stock transformers, in every domain and at four budgets.

float32: 256 greedy tokens must be the same. bfloat16: teacher-forced on those tokens, the share of places where the
most likely token is stock's, beside the share on which two of stock's own implementations agree.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import hotset
from hotset import reference

from common import publish

MEMORIES = ("100%", "50%", "25%", "12.5%")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def stock(dtype: torch.dtype, implementation: str) -> Any:
    """The model as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(
        reference.path(), dtype=dtype, experts_implementation=implementation
    ).to(DEVICE)


def greedy(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    """The prompt with its greedy continuation."""
    tokens: torch.Tensor = model.generate(
        ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return tokens


@torch.no_grad()
def choices(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The most likely token at every place of a text."""
    best: torch.Tensor = model(tokens).logits[0].argmax(-1)
    return best


def prompts(tokenizer: Any) -> dict[str, torch.Tensor]:
    """The first prompt of every domain."""
    texts = {name: reference.workload(name).prompts[0].text for name in reference.DOMAINS}
    return {name: tokenizer(text, return_tensors="pt").input_ids.to(DEVICE) for name, text in texts.items()}


def agreement(some: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The share of places at which two models choose the same token."""
    same = sum(int((some[name] == other[name]).sum()) for name in some)
    return same / sum(some[name].numel() for name in some)


def main() -> None:
    """Compare and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256)
    count = parser.parse_args().tokens
    logging.disable_progress_bar()
    ids = prompts(AutoTokenizer.from_pretrained(reference.path()))
    plain = stock(torch.float32, "grouped_mm")
    texts = {name: greedy(plain, prompt, count) for name, prompt in ids.items()}
    own = {name: stock(torch.bfloat16, name) for name in ("grouped_mm", "batched_mm", "eager")}
    chosen = {kind: {name: choices(model, text) for name, text in texts.items()} for kind, model in own.items()}
    pairs = [("grouped_mm", "batched_mm"), ("grouped_mm", "eager"), ("batched_mm", "eager")]
    among = {f"{a} and {b}": agreement(chosen[a], chosen[b]) for a, b in pairs}
    rows = []
    for memory in MEMORIES:
        model = hotset.load(reference.path(), memory=memory, dtype=torch.float32, device=DEVICE)
        equal = {name: torch.equal(greedy(model, prompt, count), texts[name]) for name, prompt in ids.items()}
        rate = model.hotset.stats()["decode"]["hit_rate"]
        model.hotset.close()
        half = hotset.load(reference.path(), memory=memory, dtype=torch.bfloat16, device=DEVICE)
        ours = {name: choices(half, text) for name, text in texts.items()}
        half.hotset.close()
        rows.append(
            {
                "memory": memory,
                "float32_texts_equal": sum(equal.values()),
                "of": len(equal),
                "differs": [name for name, same in equal.items() if not same],
                "decode_hit_rate": rate,
                "bfloat16_agreement_with_grouped_mm": agreement(ours, chosen["grouped_mm"]),
            }
        )
        print(rows[-1], flush=True)
    publish(
        f"reference_exactness_{DEVICE}",
        {
            "new_tokens": count,
            "device": DEVICE,
            "torch": torch.__version__,
            "stock_among_itself": among,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
