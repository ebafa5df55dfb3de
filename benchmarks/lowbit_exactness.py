"""Packed experts on a CPU against the same experts decoded: the reference model in 14 domains, by format.

Decoded means that every matrix is expanded before its product, which gives the bits of `--experts dense`. float32: the
greedy text must be the same. bfloat16: the share of places in that text where the most likely token is the same, given
the whole text at once, and in some domains token by token, where every product is one of few tokens. Packed and decoded
products have the same weights and add them up in another order, which bfloat16 makes visible: decoded experts whose
sums are float64 say what the order alone does.

python benchmarks/lowbit_exactness.py
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

import hotset
from hotset import reference
from hotset.engine.kernels import packed
from hotset.models.packing import pack

from common import publish

KINDS = ("int4", "int8", "mxfp4")
BY_TOKEN = 4
"""Domains that are given token by token as well."""
USUAL = packed.FEW_TOKENS
Product = packed.PackedLinear.__call__
Texts = dict[str, torch.Tensor]


def both(model: Any, compute: Callable[[Any], Texts]) -> tuple[Texts, Texts]:
    """What a model computes with packed experts, and with decoded ones."""
    found = compute(model)
    packed.FEW_TOKENS = 0
    try:
        return found, compute(model)
    finally:
        packed.FEW_TOKENS = USUAL


def in_float64(self: packed.PackedLinear, inputs: torch.Tensor, rows: Sequence[int], ends: Sequence[int]) -> Any:
    """Products of decoded matrices whose sums are float64."""
    inputs = inputs.to(self.dtype)
    out = inputs.new_empty((ends[-1], self.width))
    for row, start, end in zip(rows, (0, *ends), ends, strict=False):
        given = inputs if len(inputs) == 1 else inputs[start:end]
        out[start:end] = given.double() @ self._expanded(self.kernels, row).T.double()
    return out


def with_other_sums(model: Any, compute: Callable[[Any], Texts]) -> Texts:
    """What a model computes with decoded experts whose sums are float64."""
    packed.PackedLinear.__call__ = in_float64
    try:
        return compute(model)
    finally:
        packed.PackedLinear.__call__ = Product


def texts(ids: Texts, count: int) -> Callable[[Any], Texts]:
    """Greedy continuations of all prompts."""

    def compute(model: Any) -> Texts:
        return {
            name: model.generate(one, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
            for name, one in ids.items()
        }

    return compute


def choices(ids: Texts) -> Callable[[Any], Texts]:
    """The most likely token at every place of some texts, given at once."""

    @torch.no_grad()
    def compute(model: Any) -> Texts:
        return {name: model(one).logits[0].argmax(-1) for name, one in ids.items()}

    return compute


def stepwise(ids: Texts) -> Callable[[Any], Texts]:
    """The same, given token by token."""

    @torch.no_grad()
    def compute(model: Any) -> Texts:
        found = {}
        for name, one in ids.items():
            cache, chosen = None, []
            for token in one[0]:
                out = model(token.view(1, 1), past_key_values=cache, use_cache=True)
                cache, best = out.past_key_values, out.logits[0, -1].argmax()
                chosen.append(best)
            found[name] = torch.stack(chosen)
        return found

    return compute


def agreement(some: Texts, other: Texts) -> float:
    """The share of places that are the same."""
    same = sum(int((some[name] == other[name]).sum()) for name in some)
    return same / sum(one.numel() for one in some.values())


def compare(folder: Path, kind: str, ids: Texts, count: int) -> dict[str, Any]:
    """One format in both types."""
    packs = {dtype: folder / f"{kind}-{dtype}" for dtype in ("float32", "bfloat16")}
    for dtype, path in packs.items():
        pack(reference.path(), path, dtype=dtype, experts=kind)
    model = hotset.load(packs["float32"], memory="100%", device="cpu")
    found, expected = both(model, texts(ids, count))
    model.hotset.close()
    half = hotset.load(packs["bfloat16"], memory="100%", device="cpu")
    at_once = both(half, choices(expected))
    some = {name: expected[name] for name in list(expected)[:BY_TOKEN]}
    by_token, other_sums = both(half, stepwise(some)), with_other_sums(half, stepwise(some))
    half.hotset.close()
    same = [name for name in ids if torch.equal(found[name], expected[name])]
    return {
        "format": kind, "float32_texts_equal": len(same), "of": len(ids), "differs": sorted(set(ids) - set(same)),
        "bfloat16_agreement": agreement(*at_once), "places": sum(one.numel() for one in expected.values()),
        "token_by_token": {
            "agreement": agreement(*by_token), "decoded_with_float64_sums": agreement(by_token[1], other_sums),
            "decoded_with_itself_at_once": agreement(by_token[1], at_once[1]),
            "places": sum(one.numel() for one in some.values()),
        },
    }  # fmt: skip


def main() -> None:
    """Compare and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--domains", type=int, default=len(reference.DOMAINS))
    options = parser.parse_args()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(reference.path())
    prompts = {name: reference.workload(name).prompts[0].text for name in reference.DOMAINS[: options.domains]}
    ids = {name: tokenizer(text, return_tensors="pt").input_ids for name, text in prompts.items()}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            rows.append(compare(Path(folder), kind, ids, options.tokens))
            print(rows[-1], flush=True)
    publish("lowbit_exactness", {"new_tokens": options.tokens, "torch": torch.__version__, "rows": rows})


if __name__ == "__main__":
    main()
