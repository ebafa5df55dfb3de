"""What small experts cost: the reference model's in every format, beside llama.cpp's, in 14 domains, teacher-forced.

All kinds are compared alike: the experts' matrices are replaced by what they decode to, everything else and all
arithmetic stay float32, so that the figures are of the codes alone. Calibrated kinds have seen other text of the same
14 domains. llama.cpp's codes are made by its own code (the `bench` extra: gguf, xllamacpp). Held-out text is cut into
several texts without a token in common: what they differ by says how far the figures go.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hotset import reference
from hotset.formats import element_type, parse
from hotset.generation.calibration import TextCalibration
from hotset.models.moments import Moments
from hotset.models.packing import MADE, inspect_experts
from hotset.models.quality import Distances
from hotset.models.windows import WINDOW_TOKENS, TokenText, Window, logits_of
from hotset.options import RunOptions

from common import ROOT, machine, publish

Tensor = torch.Tensor
Importance = Callable[[int, str, int], Tensor | None]
Code = Callable[[Tensor, Tensor | None], Tensor]
"""What a matrix [outputs, inputs] becomes, given how much its inputs count."""
MATRICES = ("gate_up_proj", "down_proj")


class Kind(NamedTuple):
    """One way to make experts small: what it does to a matrix, and the bits of a weight by the inputs of its matrix."""

    code: Code
    bits: Callable[[int], float]
    calibrated: bool = False


class Texts(NamedTuple):
    """What models are compared on, what they are calibrated on, and where both are from."""

    held_out: dict[str, list[Window]]
    calibration: TokenText
    source: str
    sha256: str


def texts(windows: int, count: int = 1) -> Texts:
    """Held-out and training text of each domain, or the prompts that ship with hotset where there is no corpus."""
    tokenizer = AutoTokenizer.from_pretrained(reference.path())
    source, both = _corpus()
    held_out: dict[str, list[Window]] = {}
    seen: list[Window] = []
    for domain, (other, own) in both.items():
        held_out[domain] = _windows(tokenizer, domain, own, windows * count)
        seen += _windows(tokenizer, domain, other, windows)
    digest = hashlib.sha256(repr(held_out).encode()).hexdigest()
    return Texts(held_out, TokenText("other text of the domains", "", tuple(seen)), source, digest)


def _corpus() -> tuple[str, dict[str, tuple[str, str]]]:
    sys.path.insert(0, str(ROOT / "recipes" / "reference"))
    try:
        from corpus import read, split

        blocks = {domain: split(read(domain)) for domain in reference.DOMAINS}
    except (ImportError, OSError):
        prompts = {domain: [one.text for one in reference.workload(domain).prompts] for domain in reference.DOMAINS}
        halves = {domain: ("\n\n".join(all_[1::2]), "\n\n".join(all_[::2])) for domain, all_ in prompts.items()}
        return "prompts that ship with hotset", halves
    return "blocks of the corpus that the reference model was not trained on", {
        domain: (trained[len(trained) // 2], held_out[0]) for domain, (trained, held_out) in blocks.items()
    }


def _windows(tokenizer: Any, domain: str, text: str, count: int) -> list[Window]:
    ids = tokenizer(text[: count * WINDOW_TOKENS * 12], add_special_tokens=False, verbose=False)["input_ids"]
    starts = range(0, min(len(ids) // WINDOW_TOKENS, count) * WINDOW_TOKENS, WINDOW_TOKENS)
    return [Window(domain, tuple(ids[start : start + WINDOW_TOKENS])) for start in starts]


def _share(parts: dict[str, list[Distances]], number: int, shares: int) -> list[Distances]:
    """One of several texts: windows of all domains next to each other."""
    chosen = []
    for part in parts.values():
        size = len(part) // shares
        chosen += part[number * size : (number + 1) * size]
    return chosen


class Bench:
    """The stock model in float32, whose experts can be replaced and compared with what they were."""

    def __init__(self, held_out: dict[str, list[Window]]) -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(reference.path(), dtype=torch.float32).eval()
        self.layers = [layer.mlp.experts for layer in self.model.model.layers]
        self.original = [{name: getattr(layer, name).detach().clone() for name in MATRICES} for layer in self.layers]
        self.held_out = held_out
        self._logits = {domain: logits_of(self.model, windows) for domain, windows in held_out.items()}

    @torch.no_grad()
    def replace(self, change: Callable[[int, str, int, Tensor], Tensor]) -> None:
        """Put in what each matrix of each expert is changed to: by layer, name, expert and what it was."""
        for number, (layer, original) in enumerate(zip(self.layers, self.original, strict=True)):
            for name in MATRICES:
                for expert, matrix in enumerate(original[name]):
                    getattr(layer, name).data[expert] = change(number, name, expert, matrix)

    def compare(self, domains: list[str] | None = None, texts: int = 1) -> dict[str, Any]:
        """The figures of the experts as they are now, over all domains and in each, and in so many texts."""
        parts: dict[str, list[Distances]] = {}
        for domain in domains or list(self.held_out):
            windows = self.held_out[domain]
            rows = zip(windows, self._logits[domain], logits_of(self.model, windows), strict=True)
            parts[domain] = [Distances.between(a, b, torch.tensor(w.ids)) for w, a, b in rows]
        whole = Distances.joined([one for part in parts.values() for one in part]).summary()
        found: dict[str, Any] = {
            "domains": {domain: Distances.joined(part).summary() for domain, part in parts.items()}
        }
        if texts > 1:
            found["texts"] = [Distances.joined(_share(parts, number, texts)).summary() for number in range(texts)]
        return whole | found

    def bits(self, kind: Kind) -> float:
        """The bits of a weight, over all matrices of an expert."""
        sizes = [(self.original[0][name][0].numel(), self.original[0][name].shape[-1]) for name in MATRICES]
        return sum(size * kind.bits(inputs) for size, inputs in sizes) / sum(size for size, _ in sizes)


def ours(spec: str) -> Code:
    """A format of hotset, as `hotset pack` makes it."""
    chosen = replace(parse(spec), dtype="float32")

    def code(matrix: Tensor, importance: Tensor | None) -> Tensor:
        parts = [torch.empty(p.shape, dtype=element_type(p.dtype)) for p in chosen.parts(*matrix.shape)]
        chosen.encode(matrix, parts, importance)
        out = torch.empty_like(matrix)
        chosen.decode(parts, out)
        return out

    return code


def our_bits(spec: str) -> Callable[[int], float]:
    """What a format of hotset takes."""
    chosen = parse(spec)
    sizes = {"uint8": 8, "bfloat16": 16}
    return lambda inputs: sum(np.prod(p.shape) * sizes[p.dtype] for p in chosen.parts(64, inputs)) / (64 * inputs)


def llama_kinds() -> dict[str, Kind]:
    """llama.cpp's quantisations, those that it falls back to for few inputs among them; none where it is missing."""
    try:
        import gguf
        import xllamacpp.xllamacpp as built
    except ImportError:
        return {}
    library = ctypes.CDLL(built.__file__)
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = (
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p,
    )  # fmt: skip
    types = gguf.GGMLQuantizationType

    def chosen(name: str, inputs: int) -> Any:
        """Blocks of Q4_K have 256 inputs: where they do not divide, llama.cpp takes Q5_0 in its place."""
        return types.Q5_0 if name == "Q4_K" and inputs % 256 else types[name]

    def made(name: str) -> Code:
        def code(matrix: Tensor, importance: Tensor | None) -> Tensor:
            outputs, inputs = matrix.shape
            kind, numbers = chosen(name, inputs), np.ascontiguousarray(matrix.numpy())
            block, size = gguf.GGML_QUANT_SIZES[kind]
            raw = np.zeros((outputs, inputs // block * size), np.uint8)
            weights = None if importance is None else np.ascontiguousarray(importance.numpy())
            pointer = None if weights is None else weights.ctypes.data
            library.ggml_quantize_chunk(kind, numbers.ctypes.data, raw.ctypes.data, 0, outputs, inputs, pointer)
            return torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(raw, kind)))

        return code

    def bits(name: str) -> Callable[[int], float]:
        def of(inputs: int) -> float:
            block, size = gguf.GGML_QUANT_SIZES[chosen(name, inputs)]
            return float(size * 8 / block)

        return of

    plain = {f"llama.cpp {name}": Kind(made(name), bits(name)) for name in ("Q8_0", "Q4_0", "Q4_K")}
    weighed = {f"llama.cpp {name}, importance matrix": Kind(made(name), bits(name), True) for name in ("Q4_0", "Q4_K")}
    return plain | weighed


def all_kinds() -> dict[str, Kind]:
    """Ours, plain and calibrated, then llama.cpp's."""
    found = {}
    for name, spec in MADE.items():
        found[name] = Kind(ours(spec), our_bits(spec))
        found[f"{name}, calibrated"] = Kind(ours(spec), our_bits(spec), True)
    return found | llama_kinds()


def moments_of(text: TokenText) -> Moments:
    """What `hotset pack --calibrate` collects."""
    moments = Moments()
    moments.expect(inspect_experts(str(reference.path())).moe_layers or [])
    with tempfile.TemporaryDirectory() as folder:
        options = RunOptions(device="cpu", memory="50%")
        TextCalibration(str(reference.path()), options, text).collect(moments, Path(folder) / "moments")
    return moments


def main() -> None:
    """Compare all kinds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=4, help=f"windows of {WINDOW_TOKENS} tokens of a domain's text")
    parser.add_argument("--texts", type=int, default=3, help="texts of so many windows, without a token in common")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    given = texts(options.windows, options.texts)
    bench, moments = Bench(given.held_out), moments_of(given.calibration)
    rows = []
    for name, kind in all_kinds().items():
        known: Importance = moments.of if kind.calibrated else lambda *_: None
        bench.replace(lambda layer, part, e, matrix, kind=kind, known=known: kind.code(matrix, known(layer, part, e)))
        found = bench.compare(texts=options.texts)
        rows.append({"kind": name, "bits_per_weight": round(bench.bits(kind), 4)} | found)
        print(
            f"{name:36} {rows[-1]['bits_per_weight']:6.3f} bits  KL {found['kl_mean']:.5f} mean {found['kl_p99']:.4f} "
            f"p99  same top {100 * found['same_top']:.2f} %  perplexity {found['packed_perplexity']:.4f} "
            f"({found['perplexity']:.4f})  KL by text {[one['kl_mean'] for one in found.get('texts', [])]}",
            flush=True,
        )
    packages = {"torch": version("torch")}
    for name in ("gguf", "xllamacpp"):
        try:
            packages[name] = version(name)
        except ImportError:
            packages[name] = "missing"
    text = {"source": given.source, "sha256_of_windows": given.sha256, "calibration_tokens": given.calibration.tokens}
    publish("lowbit_quality", {"machine": machine(), "packages": packages, "text": text, "kinds": rows})


if __name__ == "__main__":
    main()
