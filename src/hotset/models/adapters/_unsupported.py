"""Classes that hold experts of a kind hotset does not serve: they are refused by name, never run as if dense."""

from __future__ import annotations

from typing import Final

import torch

from hotset.errors import ModelError

_QUANTISED: Final = (
    "the experts stay quantised while they compute, and the scales that belong to them would be left behind: "
    "load with the weights widened (quantization_config=...Config(dequantize=True)) or from an unquantised checkpoint"
)

REASONS: Final = {
    "AriaGroupedExpertsGemm": "this version of transformers runs Aria's experts with code of its own: "
    "use transformers 5.22 or newer",
    "DogeCDMoE": "its thousands of experts are single rows of an embedding, too small to be fetched one by one",
    "VitPoseBackboneMoeMLP": "the data set an image comes from decides its expert, no router does",
    "FP8Experts": _QUANTISED,
    "FbgemmFp8Llama4TextExperts": _QUANTISED,
    "GgufExperts": _QUANTISED,
    "Mxfp4GptOssExperts": _QUANTISED,
    "SequentialLlama4TextExperts": _QUANTISED,
}
"""Why, by the name of the class."""


def refuse_unsupported(name: str, module: torch.nn.Module) -> None:
    """Raise ModelError if a module is one of these."""
    kind = type(module).__name__
    if kind in REASONS:
        raise ModelError(f"hotset cannot run {kind} ({name}): {REASONS[kind]}")
