"""Quantised checkpoints: which can be run, and how their experts become plain numbers again."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from hotset.errors import ModelError
from hotset.formats import methods
from hotset.models.encoded import HIDDEN

_CONFIGS = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}


def dequantising(model: str, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What to pass to from_pretrained so that a quantised checkpoint is dequantised, and what to tell of it."""
    import transformers

    if "quantization_config" in options:
        return {}, []
    hub = {"trust_remote_code": False} | {key: options[key] for key in _HUB if key in options}
    config = options.get("config") or transformers.AutoConfig.from_pretrained(model, **hub)
    method = _method(config)
    if method is None:
        return {}, []
    if keep_encoded(config):
        return {"config": config}, []
    if method not in _CONFIGS:
        raise ModelError(
            f"this checkpoint is quantised by {method}, which hotset cannot take apart by expert: use the original "
            "weights, or a checkpoint in FP8 or MXFP4"
        )
    if find_spec("accelerate") is None:
        raise ModelError(f"transformers needs accelerate to read {method} weights: pip install accelerate")
    note = f"the checkpoint's {method} weights are dequantised as they are loaded; hotset pack does it once for all"
    return {"quantization_config": getattr(transformers, _CONFIGS[method])(dequantize=True)}, [note]


def keep_encoded(config: Any) -> bool:
    """Hide from transformers how a checkpoint is quantised, if a weight format of ours reads it; returns whether so."""
    if _method(config) not in methods():
        return False
    setattr(config, HIDDEN, config.quantization_config)
    del config.quantization_config
    return True


_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "trust_remote_code")


def _method(config: Any) -> str | None:
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method))
