"""Runs tiny models of all families through hotset and compares them with stock transformers.

``python tests/families/exactness.py [--out FOLDER] [name ...]`` prints a line per family; `make families` runs all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tiny_models as tiny
import torch
import transformers
from torch import nn

import hotset
from hotset.engine.arena import poison

MEMORIES = ("50%", "2 slots a layer")
NEW_TOKENS = 6

# Stock is no reference where it is wrong: test_adapters.py holds NLLB-MoE to the published layer instead.
NO_REFERENCE = {"nllb_moe": "stock sends every token to experts 0 and 1"}
TOLERANCE = 2e-4
"""For families whose stock code uses other kernels than hotset, of logits whose spread is about 1."""


@dataclass
class Verdict:
    """How one family fared at one budget."""

    family: str
    memory: str
    bit_equal: bool
    max_difference: float
    tokens_equal: bool | None
    hits: int
    misses: int
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether the family may be called exact."""
        return not self.error and self.max_difference <= TOLERANCE and self.tokens_equal is not False


def aligned(model: nn.Module) -> nn.Module:
    """Move weights out of the mapped file: products round differently by the alignment of their operands."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def budget(memory: str, folder: Path, name: str) -> str:
    """What to ask hotset for."""
    if memory.endswith("%"):
        return memory
    layers = len(tiny.experts_modules(tiny.make(name)))
    if name == "jetmoe":
        layers //= 4  # of its four linear maps per layer two make an expert, and two belong to attention
    return f"{2 * layers} slots"


def generate(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """A few greedy tokens."""
    asked = {key: value for key, value in given.items() if key != "decoder_input_ids"}
    with tiny.quiet():
        tokens: torch.Tensor = model.generate(
            **asked, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
    return tokens


def judge(name: str, memory: str, folder: Path) -> Verdict:
    """Compare one family at one budget; every slot is poisoned first, so that unfetched bytes would show."""
    stock = aligned(tiny.load(name, folder))
    given = tiny.inputs(name, stock)
    with tiny.quiet():
        model = hotset.load(
            str(folder), memory=budget(memory, folder, name), dtype=torch.float32, auto_class=tiny.auto_class(name)
        )
    aligned(model)
    poison(model.hotset.engine.offload.arena)
    try:
        expected, found = tiny.logits(stock, given), tiny.logits(model, given)
        tokens = torch.equal(generate(stock, given), generate(model, given)) if tiny.can_generate(name) else None
        stats = model.hotset.stats()
        difference = float((expected - found).abs().max())
        if not found.isfinite().all():
            difference = float("inf")
        return Verdict(name, memory, torch.equal(expected, found), difference, tokens, stats["hits"], stats["misses"])
    finally:
        model.hotset.close()


def sweep(names: list[str], memories: tuple[str, ...] = MEMORIES) -> list[Verdict]:
    """Judge many families, one after another."""
    verdicts = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            tiny.save(name, folder)
            for memory in memories:
                began = time.perf_counter()
                try:
                    verdict = judge(name, memory, Path(folder))
                except Exception as error:
                    text = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
                    verdict = Verdict(name, memory, False, float("nan"), None, 0, 0, text)
                verdicts.append(verdict)
                print(line(verdict, time.perf_counter() - began), file=sys.stderr, flush=True)
    return verdicts


def line(verdict: Verdict, seconds: float) -> str:
    """One family for people."""
    how = verdict.error or (
        ("bit-equal" if verdict.bit_equal else f"max|d| {verdict.max_difference:.1e}")
        + {True: ", tokens equal", False: ", TOKENS DIFFER", None: ", does not generate"}[verdict.tokens_equal]
    )
    mark = "ok  " if verdict.passed else "FAIL"
    return f"{mark} {verdict.family:28} {verdict.memory:16} {seconds:5.2f} s  {how}"


def main() -> None:
    """Judge the families named, or all, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = args.names or [name for name in tiny.families() if name not in NO_REFERENCE]
    verdicts = sweep(names)
    failed = [verdict for verdict in verdicts if not verdict.passed]
    document = {
        "command": "make families",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "families": len(names),
        "runs": len(verdicts),
        "bit_equal": sum(verdict.bit_equal for verdict in verdicts),
        "generate_equal": sum(verdict.tokens_equal is True for verdict in verdicts),
        "failed": len(failed),
        "left_out": NO_REFERENCE,
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    if args.out:
        path = args.out / f"families_{transformers.__version__}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({key: value for key, value in document.items() if key != "verdicts"}))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
