"""Tiny models pruned of experts that a prompt never chose, beside the same models as stock runs them.

``python tests/analysis/pruned_models.py`` prints a line for every family that `hotset prune` knows; the largest
difference of a logit, for each of several random models.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_models as tiny
import torch
import transformers
from tiny_configs import fields_of
from transformers import AutoModelForCausalLM

from hotset.analysis.prune import Pruner, PruneReport
from hotset.analysis.prune_families import FAMILIES
from hotset.analysis.saliency import Saliency
from hotset.analysis.saliency_kernels import SaliencyRecorder
from hotset.models.load import load_model
from hotset.options import RunOptions

OPTIONS = RunOptions(device="cpu", memory="50%", engine="host", prefetch="off")
IDS = torch.tensor([[5, 9]])


def silent(_: str) -> Any:
    """No progress bar."""
    return nullcontext()


def save(name: str, folder: Path, seed: int = 0, **changes: Any) -> None:
    """A tiny checkpoint of a family."""
    model = tiny.make(name, seed, **changes)
    with tiny.quiet():
        model.save_pretrained(folder)


def saliency_of(folder: Path, ids: torch.Tensor = IDS) -> Saliency:
    """What the experts of a checkpoint do on some tokens."""
    recorder = SaliencyRecorder()
    with tiny.quiet():
        model = load_model(str(folder), OPTIONS, None, kernels=recorder.kernels).eval()
    found = recorder.begin(model, {})
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    model.hotset.close()
    return found


def prune(folder: Path, out: Path, *, keep: str = "75%", by: str = "frequency", **more: Any) -> PruneReport:
    """Prune a checkpoint, by what its experts do on a prompt unless told otherwise."""
    if not more.keys() & {"saliency", "profile", "workload"}:
        more["saliency"] = out.with_name(f"{out.name}.saliency")
        saliency_of(folder).save(more["saliency"])
    with tiny.quiet():
        return Pruner(str(folder), out, by=by, keep=keep, options=OPTIONS, **more).prune(silent)


def stock_logits(folder: Path, ids: torch.Tensor = IDS) -> torch.Tensor:
    """What plain transformers makes of some tokens; missing or unexpected weights are an error."""
    with tiny.quiet():
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    wrong = {key: found for key, found in info.items() if found and key.endswith("_keys")}
    assert not wrong, wrong
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return tiny.logits(model.eval(), {"input_ids": ids})


@dataclass(frozen=True)
class Pruned:
    """One family: what pruning said, and by how much its logits moved."""

    report: PruneReport
    difference: float


def judged(name: str, place: Path, seed: int = 0, *, keep: str = "75%", **changes: Any) -> Pruned:
    """Prune a tiny model of experts that the prompt never chose."""
    folder, out = place / f"{name}-{seed}", place / f"{name}-{seed}-pruned"
    save(name, folder, seed, **changes)
    report = prune(folder, out, keep=keep)
    return Pruned(report, float((stock_logits(out) - stock_logits(folder)).abs().max()))


def main() -> None:
    """Prune the families named on the command line, or all, with and without shares among the chosen experts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the differences as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in options.families:
        flagged = "norm_topk_prob" in fields_of(tiny.model_class(name).config_class)
        for changes in ({"norm_topk_prob": True}, {"norm_topk_prob": False}) if flagged else ({},):
            with tempfile.TemporaryDirectory() as place:
                found = [judged(name, Path(place), seed, **changes) for seed in range(options.seeds)]
            differences, notes = [one.difference for one in found], found[0].report.notes
            told = [line for line in notes if "shares among all experts" in line]
            rows.append({"family": name, **changes, "differences": differences, "told": told})
            print(f"{name:18} {changes!s:26} {' '.join(f'{one:.1e}' for one in differences)}  {told}", flush=True)
    if options.out is not None:
        made = {"transformers": transformers.__version__, "torch": torch.__version__, "experts": 8, "keep": 6}
        options.out.write_text(json.dumps(made | {"families": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
