"""The device-driven engine against stock transformers on the reference model, in every domain.

float32: 128 greedy tokens must be stock's. bfloat16: decode steps on those tokens, one forced token after another in a
static cache, replayed by the device; the share of places whose likeliest token is that of stock's grouped_mm, and the
largest error of a logit against float32, beside the same of stock's own implementations forced in the same way.
Kernels are not tuned here, which takes minutes, but for HOTSET_TUNE=1.

python benchmarks/gpu_exactness.py [--tokens 128] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

import hotset
from hotset import reference
from hotset.engine.device.capture import side_stream
from hotset.models.static_caches import static_cache
from reference_exactness import DEVICE, agreement, greedy, prompts, stock

from common import plain, publish

SETTINGS = (("25%", "off"), ("50%", "off"), ("25%", "gate"))
IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
CONTEXT = 512
EAGER_TOKENS = 32
"""It cannot be captured, so that a step takes as long as twenty others: its places are the first of each domain."""
TOLERANCE = 1.2
"""Our largest error, in units of the largest of stock's own implementations."""

Tensor = torch.Tensor
Texts = dict[str, Tensor]
Logits = dict[str, Tensor]
Step = Callable[..., Tensor]


class Captured:
    """A stock model's decode step as one CUDA graph, if it can be: nothing changes but the time it takes."""

    def __init__(self, model: Any) -> None:
        self.model, self.graph, self.tried = model, None, False
        self.inputs: dict[str, Any] = {}

    def __call__(self, **given: Any) -> Tensor:
        """The logits of a step, until the next one."""
        if not self.tried:
            self._try_to_capture(given)
        if self.graph is None:
            return self.model(**given).logits
        for name, value in given.items():
            if isinstance(value, Tensor):
                self.inputs[name].copy_(value)
        self.graph.replay()
        return self.logits

    def _try_to_capture(self, given: dict[str, Any]) -> None:
        self.tried = True
        try:
            self._capture(given)
        except RuntimeError as error:
            print(f"not captured, and slower: {error}", flush=True)

    def _capture(self, given: dict[str, Any]) -> None:
        layers = given["past_key_values"].layers
        self.inputs = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
        lengths = [layer.cumulative_length.clone() for layer in layers]
        with side_stream(torch.device(DEVICE)):
            for _ in range(2):
                self.model(**self.inputs)
        for layer, length in zip(layers, lengths, strict=True):
            layer.cumulative_length.copy_(length)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.logits = self.model(**self.inputs).logits
        self.graph = graph


def plainly(model: Any) -> Step:
    """A model's decode step as it is called by anybody."""
    return lambda **given: model(**given).logits


@torch.no_grad()
def forced(model: Any, step: Step, texts: Texts, begins: dict[str, int], tokens: int) -> Logits:
    """The logits of the decode steps of every text: its prompt at once, then one token of it after another."""
    cache, keys, found = static_cache(model.config, CONTEXT), torch.arange(CONTEXT, device=DEVICE), {}
    for name, text in texts.items():
        cache.reset()
        begin = begins[name]
        model(input_ids=text[:, :begin], past_key_values=cache, use_cache=True, logits_to_keep=1)
        rows = torch.empty((tokens, model.config.vocab_size), device=DEVICE)
        for at in range(begin, begin + tokens):
            position = torch.full((1, 1), at, device=DEVICE)
            rows[at - begin] = step(
                input_ids=text[:, at : at + 1], past_key_values=cache, position_ids=position,
                attention_mask=(keys <= position)[:, None, None], use_cache=True, logits_to_keep=1,
            )[0, -1]  # fmt: skip
        found[name] = rows
    return found


def padded(ids: Texts) -> tuple[Tensor, Tensor]:
    """All prompts as one batch, padded on the left, and its mask."""
    width = max(row.shape[1] for row in ids.values())
    rows = [torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in ids.values()]
    masks = [torch.nn.functional.pad(torch.ones_like(row), (width - row.shape[1], 0)) for row in ids.values()]
    return torch.cat(rows), torch.cat(masks)


def texts_of(whole: Any, ids: Texts, count: int) -> Texts:
    """Stock's greedy texts, of all domains at once."""
    batch, mask = padded(ids)
    out = whole.generate(
        batch, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return {name: out[i : i + 1, batch.shape[1] - ids[name].shape[1] :] for i, name in enumerate(ids)}


def ours(memory: str, prefetch: str, dtype: torch.dtype) -> Any:
    """The model driven by the device, once the RAM tier is full."""
    model = hotset.load(
        str(reference.path()), memory=memory, prefetch=prefetch, engine="device", dtype=dtype, device=DEVICE
    )
    filler = model.hotset.engine.device_decode.filler
    if not filler.wait(120):
        raise SystemExit("the RAM tier was not filled in two minutes")
    return model


def closed(model: Any) -> dict[str, Any]:
    """What the engine says of its run; a run that the host drove is no result."""
    stats, engine = model.hotset.stats(), model.hotset.engine
    differences = engine.device_decode.steps.differences()
    if stats["driven_by"] != "device":
        raise SystemExit("the host drove: nothing was measured")
    model.hotset.close()
    return {"decode_hit_rate": stats["decode"]["hit_rate"], "table_differences": differences}


def same_texts(memory: str, prefetch: str, whole: Any, ids: Texts, texts: Texts, count: int) -> dict[str, Any]:
    """In which domains float32 says what stock says; a batch may round a near tie away, so stock is asked again."""
    model = ours(memory, prefetch, torch.float32)
    found = {name: greedy(model, prompt, count) for name, prompt in ids.items()}
    differs = [name for name in ids if not torch.equal(found[name], texts[name])]
    differs = [name for name in differs if not torch.equal(found[name], greedy(whole, ids[name], count))]
    row = {"float32_texts_equal": len(ids) - len(differs), "of": len(ids), "differs": differs}
    return row | {f"float32_{name}": value for name, value in closed(model).items()}


def choices(logits: Logits, tokens: int) -> Texts:
    """The likeliest token at each of the first places."""
    return {name: rows[:tokens].argmax(-1) for name, rows in logits.items()}


def errors(logits: Logits, exact: Logits, tokens: int) -> dict[str, float]:
    """How far logits are from those in float32."""
    apart = [(rows[:tokens] - exact[name][:tokens]).abs() for name, rows in logits.items()]
    if not all(bool(part.isfinite().all()) for part in apart):
        return {"largest": float("inf"), "mean": float("inf")}
    return {
        "largest": max(float(part.max()) for part in apart),
        "mean": sum(float(part.mean()) for part in apart) / len(apart),
    }


def compare(logits: Logits, base: Logits, exact: Logits, stock_errors: dict[str, Any], tokens: int) -> dict[str, Any]:
    """How near one of ours comes to stock in bfloat16."""
    mine = errors(logits, exact, tokens)
    largest, mean = (max(found[name] for found in stock_errors.values()) for name in ("largest", "mean"))
    by_domain = {name: agreement({name: logits[name].argmax(-1)}, {name: base[name].argmax(-1)}) for name in logits}
    return {
        "bfloat16_agreement_with_grouped_mm": agreement(choices(logits, tokens), choices(base, tokens)),
        "bfloat16_agreement_by_domain": by_domain,
        "bfloat16_logit_error": mine,
        "error_over_stock": mine["largest"] / largest,
        "mean_error_over_stock": mine["mean"] / mean,
        "within_tolerance": mine["largest"] <= TOLERANCE * largest,
    }


class Stock:
    """Stock's texts and logits, which ours are compared with."""

    def __init__(self, count: int) -> None:
        self.ids = prompts(AutoTokenizer.from_pretrained(reference.path()))
        self.plain, self.count, self.tokens = stock(torch.float32, "grouped_mm"), count, count - 1
        self.texts = texts_of(self.plain, self.ids, count)
        self.begins = {name: prompt.shape[1] for name, prompt in self.ids.items()}
        with torch.no_grad():
            self.exact = {name: self.rows_of(name, self.plain(text).logits[0]) for name, text in self.texts.items()}
        self.found = {name: self.run(name) for name in IMPLEMENTATIONS}

    def rows_of(self, name: str, logits: Tensor) -> Tensor:
        """Of a whole text's logits those of its decode steps."""
        begin = self.begins[name]
        return logits[begin : begin + self.tokens].float()

    def run(self, implementation: str) -> Logits:
        """One implementation in bfloat16, forced."""
        began = time.perf_counter()
        model, tokens = stock(torch.bfloat16, implementation), self.places(implementation)
        step = plainly(model) if implementation == "eager" else Captured(model)
        found = forced(model, step, self.texts, self.begins, tokens)
        print(f"stock {implementation}: {time.perf_counter() - began:.1f} s", flush=True)
        return found

    def places(self, *implementations: str) -> int:
        """How many places of a text these were all forced at."""
        return min(self.tokens, EAGER_TOKENS) if "eager" in implementations else self.tokens

    def among(self) -> dict[str, float]:
        """How often two of stock's own agree."""
        pairs = [("grouped_mm", "batched_mm"), ("grouped_mm", "eager"), ("batched_mm", "eager")]
        return {
            f"{a} and {b}": agreement(*(choices(self.found[name], self.places(a, b)) for name in (a, b)))
            for a, b in pairs
        }

    def errors(self) -> dict[str, dict[str, float]]:
        """Of each implementation, as far as it was forced."""
        return {name: errors(logits, self.exact, self.places(name)) for name, logits in self.found.items()}

    def row(self, memory: str, prefetch: str) -> dict[str, Any]:
        """One setting of ours, in both types."""
        began = time.perf_counter()
        texts = same_texts(memory, prefetch, self.plain, self.ids, self.texts, self.count)
        model = ours(memory, prefetch, torch.bfloat16)
        logits = forced(model, plainly(model), self.texts, self.begins, self.tokens)
        near = compare(logits, self.found["grouped_mm"], self.exact, self.errors(), self.tokens)
        found = {"memory": memory, "prefetch": prefetch} | texts | near
        found |= {f"bfloat16_{name}": value for name, value in closed(model).items()}
        return found | {"seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    """Compare and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--settings", type=int, default=len(SETTINGS), help="how many of the settings")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("HOTSET_TUNE", "0")
    logging.disable_progress_bar()
    own = Stock(options.tokens)
    figures: dict[str, Any] = {
        "new_tokens": options.tokens, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "places": {name: own.places(name) * len(own.ids) for name in IMPLEMENTATIONS},
        "stock_among_itself": own.among(), "stock_logit_errors": own.errors(), "tolerance": TOLERANCE, "rows": [],
    }  # fmt: skip
    print(figures, flush=True)
    for memory, prefetch in SETTINGS[: options.settings]:
        figures["rows"].append(own.row(memory, prefetch))
        print(figures["rows"][-1], flush=True)
    if options.out:
        (options.out / "gpu_exactness.json").write_text(json.dumps(plain(figures), indent=1) + "\n")
    else:
        publish("gpu_exactness", figures)


if __name__ == "__main__":
    main()
