"""The reference model in every weight format: packs, checkpoints by their published layouts, and GGUF files.

Its second matrices have 32 inputs. So groups are 32 where a format leaves a choice, blocks of 128 x 128 are cut off at
the matrix's edge, and GGUF types whose blocks have 256 inputs give way there to the type that llama.cpp takes instead.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotset import formats, reference
from hotset.models.packing import MADE, pack

from common import ROOT

sys.path[:0] = [str(ROOT / "tests" / name) for name in ("formats", "support")]

import encoded_models  # noqa: E402
import published  # noqa: E402

Numbers = np.ndarray[Any, Any]
FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
"""What llama.cpp takes for matrices whose inputs are no whole blocks of 256."""
BLOCKS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "IQ4_NL", *FALLBACK)
PUBLISHED = {
    "FP8, blocks of 128": published.blocks((128, 128), torch.float32),
    "NVFP4": published.PUBLISHED["nvfp4, modelopt"],
    "FP4 of DeepSeek-V4": published.PUBLISHED["fp4, DeepSeek-V4"],
    "compressed-tensors int4": published.ct_integer(4, 32, True),
    "compressed-tensors int4, asymmetric": published.ct_integer(4, 32, False),
    "compressed-tensors int8": published.ct_integer(8, 32, True),
    "GPTQ, groups of 32": published.gptq(4, 32, second=False, by_index=False),
    "GPTQ, groups of 32, any order": published.gptq(4, 32, second=False, by_index=True),
    "AWQ, groups of 32": published.awq(32),
}
KINDS = (*MADE, *PUBLISHED, *(f"GGUF {name}" for name in BLOCKS))


def checkpoint(kind: str, folder: Path, dtype: str) -> Path:
    """The reference model in a format; a pack has the type that it is computed in."""
    target = folder / (f"packed-{dtype}" if kind in MADE else "model.gguf" if kind.startswith("GGUF") else "model")
    if target.exists():
        return target
    if kind in MADE:
        pack(reference.path(), target, dtype=dtype, experts=kind)
    elif kind in PUBLISHED:
        made = PUBLISHED[kind]
        encoded_models.rewrite(reference.path(), target, lambda name, matrix: made.named(name, matrix.float()))
        encoded_models.edit_config(target, quantization_config=made.config)
    else:
        write_gguf(kind.removeprefix("GGUF "), target)
    return target


def dense_of(kind: str, folder: Path, dtype: str) -> Path:
    """What is loaded with `--experts dense`: of packs, which are not expanded, a checkpoint of decoded numbers."""
    if kind not in MADE:
        return checkpoint(kind, folder, dtype)
    target = folder / f"decoded-{dtype}"
    if not target.exists():
        encoded_models.rewrite(reference.path(), target, lambda name, matrix: {name: as_packed(kind, matrix, dtype)})
    return target


def as_packed(kind: str, matrix: torch.Tensor, dtype: str) -> torch.Tensor:
    """A matrix as it is once it was in a pack."""
    chosen = formats.parse(f"{MADE[kind]}{',' if ':' in MADE[kind] else ':'}dtype={dtype}")
    parts = [torch.empty(part.shape, dtype=formats.element_type(part.dtype)) for part in chosen.parts(*matrix.shape)]
    chosen.encode(matrix.float(), parts)
    out = torch.empty(matrix.shape, dtype=formats.element_type(dtype))
    chosen.decode(parts, out)
    return out


def write_gguf(kind: str, target: Path) -> None:
    """A GGUF file whose experts llama.cpp's own code has made."""
    import gguf
    import gguf_models
    import xllamacpp.xllamacpp as built

    library = ctypes.CDLL(built.__file__)
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = (
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p,
    )  # fmt: skip

    def by_llama(tensor: torch.Tensor, name: str, seed: int = 0) -> Numbers:  # noqa: ARG001 - the tests' may be random
        own = gguf.GGMLQuantizationType[name]
        numbers = np.ascontiguousarray(tensor.float().numpy())
        weights, size = gguf.GGML_QUANT_SIZES[own]
        raw = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // weights * size), np.uint8)
        rows = numbers.size // numbers.shape[-1]
        library.ggml_quantize_chunk(own, numbers.ctypes.data, raw.ctypes.data, 0, rows, numbers.shape[-1], None)
        return raw

    usual, gguf_models.quantised = gguf_models.quantised, by_llama
    try:
        gguf_models.from_folder(
            Path(reference.path()), target, gguf_models.matrices_as(kind, "BF16", down=FALLBACK.get(kind))
        )
    finally:
        gguf_models.quantised = usual
