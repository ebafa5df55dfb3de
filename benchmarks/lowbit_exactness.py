"""Packed experts on a CPU against `--experts dense` of the same checkpoint, by format: the reference model, 14 domains.

float32: the greedy text must be that of dense experts. bfloat16: the share of places in that text where the most likely
token is that of dense experts, the text given at once, and its continuation token by token, where every product is one
of a single token. Packed and dense products have the same weights and add them up in another order, and bfloat16 makes
that visible: dense experts whose sums are float64 say what the order alone does. Rows are written as they come.

OMP_NUM_THREADS=1 python benchmarks/lowbit_exactness.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

import hotset
from hotset import reference
from hotset.engine.kernels import packed
from lowbit_checkpoints import KINDS, checkpoint, dense_of

from common import ROOT, publish

sys.path.insert(0, str(ROOT / "tests" / "families"))

from exactness import aligned

MEMORY = "99%"
"""Of the dense experts: all but one of each layer, so that few are expanded twice and hotset computes all of them."""
NOISE = (
    "int8", "int4", "mxfp4", "FP8, blocks of 128", "NVFP4", "FP4 of DeepSeek-V4", "compressed-tensors int4",
    "compressed-tensors int8", "GPTQ, groups of 32", "AWQ, groups of 32", "GGUF Q8_0", "GGUF Q4_K",
)  # fmt: skip
"""Formats of which dense experts are compared with themselves as well: what the order does is much alike in others."""
Texts = dict[str, torch.Tensor]


@contextmanager
def loaded(place: Path, dtype: torch.dtype, experts: str) -> Iterator[Any]:
    """The model; bits of plain products depend on where weights lie, so those beside the experts lie alike."""
    model = hotset.load(place, memory=MEMORY, prefetch="off", device="cpu", dtype=dtype, experts=experts)
    try:
        yield aligned(model)
    finally:
        model.hotset.close()


def in_float64(self: packed.PackedLinear, inputs: torch.Tensor, rows: Sequence[int], ends: Sequence[int]) -> Any:
    """Products of plain matrices whose sums are float64."""
    inputs = inputs.to(self.dtype)
    out = inputs.new_empty((ends[-1], self.width))
    for row, start, end in zip(rows, (0, *ends), ends, strict=False):
        given = inputs if len(inputs) == 1 else inputs[start:end]
        out[start:end] = given.double() @ self.matrix(row).double()
    return out


def with_other_sums(model: Any, given: Texts, begins: dict[str, int], dense: Texts, whole: Texts) -> dict[str, float]:
    """How far dense experts agree with themselves once their sums are float64."""
    usual = packed.PackedLinear.__call__
    packed.PackedLinear.__call__ = in_float64
    try:
        found = {"at_once": agreement(whole, at_once(model, given))}
        return found | {"token_by_token": agreement(dense, stepwise(model, given, begins))}
    finally:
        packed.PackedLinear.__call__ = usual


def texts(model: Any, ids: Texts, count: int) -> Texts:
    """Greedy continuations of all prompts."""
    return {
        name: model.generate(one, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        for name, one in ids.items()
    }


@torch.no_grad()
def at_once(model: Any, given: Texts) -> Texts:
    """The most likely token at every place of some texts, given at once."""
    return {name: model(one).logits[0].argmax(-1) for name, one in given.items()}


@torch.no_grad()
def stepwise(model: Any, given: Texts, begins: dict[str, int]) -> Texts:
    """The same for what follows the prompts, given token by token."""
    found = {}
    for name, one in given.items():
        cache = model(one[:, : begins[name]], use_cache=True).past_key_values
        chosen = []
        for token in one[0, begins[name] : -1]:
            out = model(token.view(1, 1), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            chosen.append(out.logits[0, -1].argmax())
        found[name] = torch.stack(chosen)
    return found


def agreement(some: Texts, other: Texts) -> float:
    """The share of places that are the same."""
    same = sum(int((some[name] == other[name]).sum()) for name in some)
    return same / places(some)


def places(some: Texts) -> int:
    """How many there are."""
    return sum(one.numel() for one in some.values())


def compare(kind: str, folder: Path, ids: Texts, count: int) -> dict[str, Any]:
    """One format in both types."""
    began, begins = time.perf_counter(), {name: one.shape[1] for name, one in ids.items()}
    with loaded(checkpoint(kind, folder, "float32"), torch.float32, "auto") as model:
        layout = model.hotset.engine.offload.catalog.layers[0].layout
        found = texts(model, ids, count)
    with loaded(dense_of(kind, folder, "float32"), torch.float32, "dense") as model:
        expected = texts(model, ids, count)
    with loaded(checkpoint(kind, folder, "bfloat16"), torch.bfloat16, "auto") as model:
        few, ours = stepwise(model, expected, begins), at_once(model, expected)
    with loaded(dense_of(kind, folder, "bfloat16"), torch.bfloat16, "dense") as model:
        dense, whole = stepwise(model, expected, begins), at_once(model, expected)
        noise = with_other_sums(model, expected, begins, dense, whole) if kind in NOISE else None
    differs = [name for name in ids if not torch.equal(found[name], expected[name])]
    return {
        "format": kind, "matrices": [matrix.format for matrix in layout.matrices],
        "float32_texts_equal": len(ids) - len(differs), "of": len(ids), "differs": differs,
        "at_once": {"agreement": agreement(ours, whole), "places": places(whole)},
        "token_by_token": {"agreement": agreement(few, dense), "places": places(dense)},
        "dense_with_float64_sums": noise,
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def main() -> None:
    """Compare and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    options = parser.parse_args()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(reference.path())
    prompts = {name: reference.workload(name).prompts[0].text for name in reference.DOMAINS}
    ids = {name: tokenizer(text, return_tensors="pt").input_ids for name, text in prompts.items()}
    rows: list[dict[str, Any]] = []
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compare(kind, Path(folder), ids, options.tokens))
        print(rows[-1], flush=True)
        figures = {"new_tokens": options.tokens, "memory": MEMORY, "threads": torch.get_num_threads()}
        publish("lowbit_exactness", figures | {"torch": torch.__version__, "rows": rows})


if __name__ == "__main__":
    main()
