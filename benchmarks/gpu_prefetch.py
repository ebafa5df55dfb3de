"""Fetching ahead on a GPU: the inflated reference model, free-running, with prefetch off, gate, auto and an oracle."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer
from transformers.utils import logging

import hotset
from hotset import reference
from hotset.runtime.event import LiveEvent
from hotset.runtime.guessing import IsNear
from hotset.runtime.passes import Pass
from hotset.shape import ExpertKey
from hotset.trace import Trace

from common import publish

PROMPT = "La storia della città di Roma comincia"
KINDS = ("off", "gate", "auto", "best", "oracle")


class Oracle:
    """Knows what a recorded run routed, for a run that repeats it."""

    def __init__(self, trace: Trace) -> None:
        self.layers, self.first = trace.shape.layers, 0
        self.experts, self.step = trace.experts, trace.step

    def after(self, layer: int, _: LiveEvent, run: Pass, room: int, is_near: IsNear) -> list[ExpertKey]:
        """The experts of the next layer, as they were."""
        step, target = run.number - 1 - self.first + (layer == self.layers - 1), (layer + 1) % self.layers
        rows = self.experts[self.step == step, target]
        keys = [ExpertKey(target, int(expert)) for expert in np.unique(rows)]
        return [key for key in keys if not is_near(key)][:room]

    def observe(self, *_: Any) -> None:
        """Nothing to learn."""

    def look(self, *_: Any) -> None:
        """Nothing to ask the device."""

    def note_pass(self, *_: Any) -> None:
        """Nothing to learn."""

    def note(self, *_: Any) -> None:
        """Nothing to learn."""


def answer(model: Any, ids: Any, tokens: int) -> tuple[Any, float]:
    """The text, and milliseconds per new token after the first."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    out = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    torch.cuda.synchronize()
    return out, 1e3 * (time.perf_counter() - began) / tokens


def measure(folder: Path, memory: str, kind: str, ids: Any, tokens: int, known: Trace | None) -> dict[str, Any]:
    """One kind at one size: warm up, then measure a few answers."""
    model = hotset.load(str(folder), memory=memory, device="cuda", prefetch="gate" if kind == "oracle" else kind)
    engine = model.hotset.engine
    answer(model, ids, 16)
    times, text = [], None
    for _ in range(3):
        model.hotset.reset_stats()
        if kind == "oracle" and known is not None:
            engine.guesser = Oracle(known)
            engine.guesser.first = model.hotset.watcher.passes
        text, ms = answer(model, ids, tokens)
        times.append(ms)
    stats = model.hotset.stats()
    counts = None if engine.ahead is None else vars(engine.ahead.counts)
    model.hotset.close()
    decode = stats["decode"]
    return {
        "memory": memory, "prefetch": kind, "ms_per_token": statistics.median(times),
        "stall_ms_per_token": 1e3 * stats["stall_s"] / tokens, "hit_rate": decode["hit_rate"],
        "misses_per_token": decode["misses"] / tokens, "guesses": counts, "ahead": stats["prefetch"],
        "text": text.tolist(), "slots": stats["slots"],
    }  # fmt: skip


def main() -> None:
    """Measure all kinds in turn at three sizes and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=5632)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    logging.disable_progress_bar()
    torch.backends.cuda.enable_cudnn_sdp(False)
    ids = AutoTokenizer.from_pretrained(reference.path())(PROMPT, return_tensors="pt").input_ids.to("cuda")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = reference.inflate(options.width, Path(folder) / "model")
        for memory in ("50%", "25%", "12.5%"):
            model = hotset.load(str(path), memory=memory, device="cuda", prefetch="off")
            answer(model, ids, 4)
            with model.hotset.trace() as recorder:
                answer(model, ids, options.tokens)
            model.hotset.close()
            found = [measure(path, memory, kind, ids, options.tokens, recorder.finish()) for kind in KINDS]
            same = all(row["text"] == found[0]["text"] for row in found)
            for row in found:
                del row["text"]
                keys = ("memory", "prefetch", "ms_per_token", "stall_ms_per_token", "ahead")
                print({key: row[key] for key in keys})
            rows += [row | {"text_as_off": same} for row in found]
    publish("gpu_prefetch", {"device": torch.cuda.get_device_name(), "width": options.width, "rows": rows})


if __name__ == "__main__":
    main()
