"""What recording saliency costs: the same kernels with and without, in one process by turns, in processor time."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from hotset import reference
from hotset.analysis.saliency_kernels import SaliencyRecorder
from hotset.engine.build import per_expert_kernels
from hotset.models.load import load_model
from hotset.models.windows import Window, run_over
from hotset.options import RunOptions

from common import publish

OPTIONS = RunOptions(device="cpu", memory="100%", engine="host", prefetch="off", context=4096)
WIDE = 256


def cost(turns: int) -> dict[str, Any]:
    """How much longer runs take that record, with experts as narrow as this model's and eight times as wide."""
    with tempfile.TemporaryDirectory() as folder:
        wide = reference.inflate(WIDE, Path(folder) / "wide")
        return {"experts 32 wide": _cost(str(reference.path()), turns), f"experts {WIDE} wide": _cost(str(wide), turns)}


def _cost(model: str, turns: int) -> dict[str, Any]:
    """The same kernels with and without recording, in turns."""
    recorder = SaliencyRecorder()
    models = [load_model(model, OPTIONS, None, kernels=make).eval() for make in (per_expert_kernels, recorder.kernels)]
    recorder.begin(models[1], {})
    ids = torch.randint(0, 8192, (1, 512), generator=torch.Generator().manual_seed(0))
    windows = [Window("", tuple(ids[0, first : first + 256].tolist())) for first in range(0, 512, 256)]
    try:
        return {
            "prefill, 512 tokens": ratio(models, lambda model: run_over(model, windows), turns),
            "decode, 16 tokens": ratio(models, lambda model: _decode(model, ids[:, :8]), turns),
        }
    finally:
        for each in models:
            each.hotset.close()


def _decode(model: Any, ids: torch.Tensor) -> None:
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, min_new_tokens=16, do_sample=False)


def ratio(models: Sequence[Any], work: Callable[[Any], None], turns: int) -> dict[str, Any]:
    """The median of the ratios of neighbouring turns, the fastest of each, and how far the ratios go."""
    for model in models:
        work(model)
    seconds = np.array([[_seconds(work, model) for model in models] for _ in range(turns)])
    ratios = (seconds[:, 1] / seconds[:, 0]).tolist()
    found = {
        "median_ratio": round(statistics.median(ratios), 4),
        "ratios": [round(min(ratios), 3), round(max(ratios), 3)],
        "fastest_ratio": round(float(seconds[:, 1].min() / seconds[:, 0].min()), 4),
        "plain_s": round(float(seconds[:, 0].min()), 4),
    }
    print(found, flush=True)
    return found


def _seconds(work: Callable[[Any], None], model: Any) -> float:
    """Processor time: other work on the machine moves it little."""
    began = time.process_time()
    work(model)
    return time.process_time() - began


def main() -> None:
    """Measure both widths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=31)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    publish("saliency_cost", {"turns": options.turns, "recording": cost(options.turns)})


if __name__ == "__main__":
    main()
