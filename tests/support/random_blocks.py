"""Blocks of GGUF's types at random, made without the package that writes such files."""

from __future__ import annotations

import numpy as np

from hotset.store.gguf import BLOCKS


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Blocks of any codes whose scales make numbers of the size of weights."""
    weights, size = BLOCKS[kind].weights, BLOCKS[kind].size_bytes
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // weights, size), dtype=np.uint8)
    for at in _SCALES[kind]:
        scales = (rng.uniform(0.5, 1, blocks.shape[:-1]) * _TAME[kind]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(119, 123, blocks.shape[:-1])
    return blocks.reshape(*shape[:-1], -1)


_SCALES = {
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (), "Q2_K": (80, 82),
    "Q3_K": (108,), "IQ2_XXS": (0,), "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2),
}  # fmt: skip
_TAME = {
    "Q4_K": 1e-4, "Q5_K": 5e-5, "Q6_K": 1e-5, "IQ4_NL": 5e-4, "IQ4_XS": 2e-5, "MXFP4": 0.0, "Q2_K": 2e-3, "Q3_K": 5e-4,
    "IQ2_XXS": 1e-3, "Q8_0": 5e-4, "Q4_0": 1e-2, "Q4_1": 5e-3, "Q5_0": 5e-3, "Q5_1": 2e-3,
}  # fmt: skip
