"""What pruning costs the reference model: four criteria and chance, calibrated by one domain and by all 14.

Every pruned model is a checkpoint that `hotset prune` wrote and plain transformers loaded, in float32, compared with
the original token by token on blocks of the corpus (HOTSET_CORPUS) that the model was not trained on. Saliency was
recorded on other blocks.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hotset import reference
from hotset.analysis.prune import Pruner
from hotset.analysis.saliency import Saliency
from hotset.analysis.saliency_runs import TextFiles, record_saliency
from hotset.models.quality import Distances
from hotset.models.windows import WINDOW_TOKENS, Window, logits_of
from hotset.options import RunOptions

from common import ROOT, publish

MODEL = str(reference.path())
OPTIONS = RunOptions(device="cpu", memory="50%")
KEEPS = ("87.5%", "75%", "50%")
CRITERIA = ("reap", "msan", "ean", "frequency")
OWN = ("it", "zh", "python", "metamath")
RANDOM_SEEDS = 3


class Texts(NamedTuple):
    """What saliency is recorded on, a file for each domain, what models are compared on, and its digest."""

    calibration: dict[str, Path]
    held_out: dict[str, list[Window]]
    sha256: str


def texts(folder: Path, windows: int) -> Texts:
    """Blocks of the corpus: of those that the model was trained on the middle one, and the first that was held out."""
    sys.path.insert(0, str(ROOT / "recipes" / "reference"))
    import corpus

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    calibration, held_out = {}, {}
    for domain in reference.DOMAINS:
        trained, other = corpus.split(corpus.read(domain))
        calibration[domain] = folder / f"{domain}.txt"
        middle = len(trained) // 2
        calibration[domain].write_text("".join(trained[middle : middle + 2]), encoding="utf-8")
        ids = tokenizer(other[0][: windows * WINDOW_TOKENS * 12], add_special_tokens=False, verbose=False)["input_ids"]
        starts = range(0, min(len(ids) // WINDOW_TOKENS, windows) * WINDOW_TOKENS, WINDOW_TOKENS)
        held_out[domain] = [Window(domain, tuple(ids[start : start + WINDOW_TOKENS])) for start in starts]
    return Texts(calibration, held_out, hashlib.sha256(repr(held_out).encode()).hexdigest())


class Bench:
    """The original's logits, and pruned models beside them."""

    def __init__(self, given: Texts, folder: Path) -> None:
        self.given, self.folder = given, folder
        original = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        self._logits = {domain: logits_of(original, windows) for domain, windows in given.held_out.items()}

    def judge(self, saliency: Saliency, by: str, keep: str) -> dict[str, Distances]:
        """Prune by a saliency, load with plain transformers, and compare in every domain."""
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            saliency.save(Path(place) / "saliency")
            pruner = Pruner(MODEL, Path(place) / "out", by, keep, OPTIONS, saliency=Path(place) / "saliency")
            pruner.prune(lambda _: nullcontext())
            model = AutoModelForCausalLM.from_pretrained(Path(place) / "out", dtype=torch.float32).eval()
            return {domain: self._compare(model, domain) for domain in self.given.held_out}

    def _compare(self, model: Any, domain: str) -> Distances:
        windows = self.given.held_out[domain]
        rows = zip(windows, self._logits[domain], logits_of(model, windows), strict=True)
        return Distances.joined([Distances.between(a, b, torch.tensor(w.ids)) for w, a, b in rows])


def figures(found: dict[str, Distances], domains: Iterable[str]) -> dict[str, float]:
    """The figures over some domains."""
    summary = Distances.joined([found[domain] for domain in domains]).summary()
    return {("pruned_perplexity" if name == "packed_perplexity" else name): value for name, value in summary.items()}


def at_random(saliency: Saliency, seed: int) -> Saliency:
    """Scores by chance; super experts stay what they are."""
    return replace(saliency, sums=np.random.default_rng(seed).random(saliency.sums.shape))


def row(calibration: str, by: str, keep: str, found: dict[str, Distances]) -> dict[str, Any]:
    """One pruned model, over all domains, and in its own and the others where it was calibrated by one."""
    values: dict[str, Any] = {"calibration": calibration, "by": by, "keep": keep, "all": figures(found, found)}
    if calibration in found:
        values["own"] = figures(found, [calibration])
        values["others"] = figures(found, [domain for domain in found if domain != calibration])
    values["kl_by_domain"] = {domain: figures(found, [domain])["kl_mean"] for domain in found}
    shown = {part: values[part] for part in ("all", "own", "others") if part in values}
    words = [f"{part} KL {one['kl_mean']:.4f} ppl {one['pruned_perplexity']:.2f}" for part, one in shown.items()]
    print(f"{calibration:10} {by:10} {keep:6} {'  '.join(words)}", flush=True)
    return values


def all_rows(bench: Bench, saliency: dict[str, Saliency]) -> list[dict[str, Any]]:
    """Every criterion and chance at every size, calibrated by all domains and by some single ones."""
    first, *others = saliency.values()
    whole = first.merged(others)
    plan = [("all", by, by, whole) for by in CRITERIA]
    plan += [("none", f"random {seed}", "ean", at_random(whole, seed)) for seed in range(RANDOM_SEEDS)]
    plan += [(domain, by, by, saliency[domain]) for domain in OWN for by in CRITERIA]
    return [row(name, shown, keep, bench.judge(one, by, keep)) for keep in KEEPS for name, shown, by, one in plan]


def main() -> None:
    """Prune and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--windows", type=int, default=3, help=f"held-out windows of {WINDOW_TOKENS} tokens of a domain"
    )
    parser.add_argument("--tokens", type=int, default=1 << 13, help="of each domain that saliency is recorded on")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        given = texts(Path(folder), options.windows)
        saliency = {
            domain: record_saliency(MODEL, TextFiles((file,), options.tokens), OPTIONS)
            for domain, file in given.calibration.items()
        }
        bench = Bench(given, Path(folder))
        rows = all_rows(bench, saliency)
    tokens = {domain: int(one.tokens.sum()) for domain, one in saliency.items()}
    text = {"sha256_of_held_out_windows": given.sha256, "calibration_tokens": tokens}
    publish("pruning", {"text": text, "rows": rows})


if __name__ == "__main__":
    main()
