"""Packed experts on a GPU against `--experts dense` of the same checkpoint: the reference model in 14 domains.

float32: the greedy text must be that of dense experts. bfloat16: decode steps on that text, one forced token after
another, driven by the device; the share of places whose most likely token is that of dense experts, driven and forced
in the same way. How often dense experts agree with themselves once the kernels sum in another order is the noise below.
Formats run side by side in processes; kernels are not tuned.

python benchmarks/gpu_lowbit_exactness.py [--kinds int4 fp8 ...] [--tokens 160] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer
from transformers.utils import logging

import hotset
from gpu_exactness import Logits, Texts, choices, forced, plainly, texts_of
from hotset import formats, reference
from hotset.engine.kernels import tuning
from hotset.models.packing import MADE, pack
from reference_exactness import DEVICE, agreement, greedy, prompts

from common import ROOT, publish

sys.path[:0] = [str(ROOT / "tests" / name) for name in ("formats", "support")]

Numbers = np.ndarray[Any, Any]
PACKED = ("int4", "int8", "mxfp4")
BLOCKS = ("Q8_0", "Q4_0", "Q4_K")
KINDS = (*PACKED, "fp8", "nvfp4", "int4 of 8-digit scales", *BLOCKS)
MEMORY = "50%"
LIMIT_S = 240


def checkpoint(kind: str, folder: Path, dtype: str) -> Path:
    """The reference model in a format; a pack has the type that it is computed in."""
    target = folder / (f"{kind}-{dtype}" if kind in PACKED else kind.replace(" ", "-"))
    if target.exists() or (target := target.with_suffix(".gguf" if kind in BLOCKS else "")).exists():
        return target
    if kind in PACKED:
        pack(reference.path(), target, dtype=dtype, experts=kind)
    elif kind in BLOCKS:
        write_gguf(kind, target)
    else:
        rewrite(kind, target)
    return target


def dense_of(kind: str, folder: Path, dtype: str) -> Path:
    """What is loaded with `--experts dense`: of packs, which are not expanded, a checkpoint of decoded numbers."""
    if kind not in PACKED:
        return checkpoint(kind, folder, dtype)
    import encoded_models

    target = folder / f"{kind}-{dtype}-decoded"
    if not target.exists():
        chosen = formats.parse(f"{MADE[kind]}{',' if ':' in MADE[kind] else ':'}dtype={dtype}")
        kept = formats.element_type(dtype)

        def decoded(name: str, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
            parts = [
                torch.empty(part.shape, dtype=formats.element_type(part.dtype)) for part in chosen.parts(*matrix.shape)
            ]
            chosen.encode(matrix.float(), parts)
            out = torch.empty(matrix.shape, dtype=kept)
            chosen.decode(parts, out)
            return {name: out}

        encoded_models.rewrite(reference.path(), target, decoded)
    return target


def rewrite(kind: str, target: Path) -> None:
    """The checkpoint with experts in a published layout."""
    import encoded_models
    import published

    made = {
        "fp8": published.blocks((128, 128), torch.float32),
        "nvfp4": published.PUBLISHED["nvfp4, modelopt"],
        "int4 of 8-digit scales": published.PUBLISHED["int4, Kimi-K2"],
    }[kind]
    encoded_models.rewrite(reference.path(), target, lambda name, matrix: made.named(name, matrix.float()))
    encoded_models.edit_config(target, quantization_config=made.config)


def write_gguf(kind: str, target: Path) -> None:
    """As llama.cpp has it: Q4_K where rows are whole blocks of 256, and Q5_0 elsewhere."""
    import gguf_models

    quantised = gguf_models.quantised

    def by_us(tensor: torch.Tensor, kind: str, seed: int = 0) -> Numbers:
        return q4_k(tensor.float().numpy()) if kind == "Q4_K" else quantised(tensor, kind, seed)

    gguf_models.quantised = by_us
    choose = gguf_models.matrices_as(kind, "BF16", down="Q5_0" if kind == "Q4_K" else None)
    gguf_models.from_folder(Path(reference.path()), target, choose)


def q4_k(numbers: Numbers) -> Numbers:
    """Blocks of 256 with a scale and a least value of 6 bits for each 32, from the extremes of each."""
    groups = numbers.reshape(*numbers.shape[:-1], -1, 8, 32)
    low = np.minimum(groups.min(-1), 0)
    steps = (groups.max(-1) - low) / 15
    d, least = (np.float16(part.max(-1, keepdims=True) / 63) for part in (steps, -low))
    scales, mins = (
        np.round(part / np.maximum(whole.astype(np.float32), 1e-12)).clip(0, 63).astype(np.uint8)
        for part, whole in ((steps, d), (-low, least))
    )
    factor = np.maximum(d.astype(np.float32) * scales, 1e-12)[..., None]
    offset = (least.astype(np.float32) * mins)[..., None]
    codes = np.round((groups + offset) / factor).clip(0, 15).astype(np.uint8)
    packed = codes[..., 0::2, :] | (codes[..., 1::2, :] << 4)
    head = [d.view(np.uint8), least.view(np.uint8)]
    head += [own[..., :4] | ((own[..., 4:] >> 4) << 6) for own in (scales, mins)]
    head.append((scales[..., 4:] & 15) | ((mins[..., 4:] & 15) << 4))
    blocks = np.concatenate([*head, packed.reshape(*packed.shape[:-2], -1)], -1)
    return blocks.reshape(*numbers.shape[:-1], -1)


def load(place: Path, dtype: torch.dtype, experts: str, engine: str = "device") -> Any:
    """The model, once the RAM tier is full."""
    model = hotset.load(
        place, memory=MEMORY, prefetch="off", engine=engine, dtype=dtype, device=DEVICE, experts=experts
    )
    if engine == "device" and not model.hotset.engine.device_decode.filler.wait(120):
        raise SystemExit("the RAM tier was not filled in two minutes")
    return model


def closed(model: Any) -> None:
    """End a model; a run that the host drove is no result."""
    if model.hotset.stats()["driven_by"] != "device":
        raise SystemExit("the host drove: nothing was measured")
    model.hotset.close()


def same_texts(place: Path, plain: Path, ids: Texts, count: int) -> tuple[Texts, list[str]]:
    """The greedy texts of dense experts in float32, and the domains in which packed ones say something else.

    Dense texts are made as a batch, which may round a near tie away: where they differ, dense is asked again.
    """
    dense = load(plain, torch.float32, "dense", "host")
    texts = texts_of(dense, ids, count)
    packed = load(place, torch.float32, "auto")
    found = {name: greedy(packed, prompt, count) for name, prompt in ids.items()}
    closed(packed)
    differs = [name for name in ids if not torch.equal(found[name], texts[name])]
    differs = [name for name in differs if not torch.equal(found[name], greedy(dense, ids[name], count))]
    dense.hotset.close()
    return texts, differs


def logits_of(place: Path, experts: str, texts: Texts, begins: dict[str, int], tokens: int) -> Logits:
    """Of all forced steps in bfloat16."""
    model = load(place, torch.bfloat16, experts)
    found = forced(model, plainly(model), texts, begins, tokens)
    closed(model)
    return found


def in_another_order(compute: Callable[[], Logits]) -> Logits:
    """The same with the last of the ways to cut up the kernels' work, not the first."""
    usual = tuning.default
    tuning.default = lambda problem: tuning.candidates(problem)[-1]
    try:
        return compute()
    finally:
        tuning.default = usual


def error(some: Logits, other: Logits) -> float:
    """The mean difference of logits."""
    return sum(float((some[name] - other[name]).abs().mean()) for name in some) / len(some)


def compare(kind: str, folder: Path, count: int) -> dict[str, Any]:
    """One format in both types."""
    began, tokens = time.perf_counter(), count - 1
    ids = prompts(AutoTokenizer.from_pretrained(reference.path()))
    begins = {name: prompt.shape[1] for name, prompt in ids.items()}
    both = [(checkpoint(kind, folder, dtype), dense_of(kind, folder, dtype)) for dtype in ("float32", "bfloat16")]
    texts, differs = same_texts(*both[0], ids, count)
    place, plain = both[1]
    packed = logits_of(place, "auto", texts, begins, tokens)
    dense = logits_of(plain, "dense", texts, begins, tokens)
    other = in_another_order(lambda: logits_of(plain, "dense", texts, begins, tokens))
    chosen = [choices(each, tokens) for each in (packed, dense, other)]
    return {
        "kind": kind, "float32_texts_equal": len(ids) - len(differs), "of": len(ids), "differs": differs,
        "bfloat16_agreement": agreement(chosen[0], chosen[1]), "places": tokens * len(ids),
        "by_domain": {name: agreement({name: chosen[0][name]}, {name: chosen[1][name]}) for name in ids},
        "dense_in_another_order": agreement(chosen[1], chosen[2]),
        "mean_logit_difference": error(packed, dense), "of_dense_in_another_order": error(dense, other),
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def side_by_side(kinds: list[str], count: int) -> list[dict[str, Any]]:
    """Every kind in a process of its own."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{number}.json" for number in range(len(kinds))]
        runs = [
            subprocess.Popen([sys.executable, __file__, "--only", kind, "--tokens", str(count), "--out", str(out)])
            for kind, out in zip(kinds, outs, strict=True)
        ]
        for run, out in zip(runs, outs, strict=True):
            try:
                run.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                run.kill()
            if out.exists():
                rows.append(json.loads(out.read_text()))
    return rows


def main() -> None:
    """Compare and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--only", choices=KINDS, help="one kind in this process; --out is the file of its row")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("HOTSET_TUNE", "0")
    logging.disable_progress_bar()
    if options.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            row = compare(options.only, Path(folder), options.tokens)
        print({name: row[name] for name in row if name != "by_domain"}, flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(row))
        return
    figures = {"new_tokens": options.tokens, "memory": MEMORY, "rows": side_by_side(options.kinds, options.tokens)}
    figures |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    if options.out is not None:
        (options.out / "gpu_lowbit_exactness.json").write_text(json.dumps(figures, indent=1) + "\n")
    else:
        publish("gpu_lowbit_exactness", figures)


if __name__ == "__main__":
    main()
