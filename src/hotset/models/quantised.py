"""Quantised checkpoints: which can be run. Their weights are read by hotset, and transformers is told nothing of it."""

from __future__ import annotations

from typing import Any

from hotset.errors import ModelError
from hotset.formats import methods
from hotset.models.encoded import HIDDEN


def own_reading(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """What to pass to from_pretrained so that a quantised checkpoint is read by our formats; one in none is refused."""
    import transformers

    if "quantization_config" in options:
        return {}
    hub = {"trust_remote_code": False} | {key: options[key] for key in _HUB if key in options}
    config = options.get("config") or transformers.AutoConfig.from_pretrained(model, **hub)
    return {"config": config} if keep_encoded(config) else {}


def keep_encoded(config: Any) -> bool:
    """Hide from transformers how a checkpoint is quantised, if a weight format of ours reads it; returns whether so."""
    method = _method(config)
    if method is None:
        return False
    if method not in methods():
        raise ModelError(
            f"this checkpoint is quantised by {method}, which hotset cannot take apart by expert: make a small one of "
            "the original weights with hotset pack --experts int4"
        )
    setattr(config, HIDDEN, config.quantization_config)
    del config.quantization_config
    return True


_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "trust_remote_code")


def _method(config: Any) -> str | None:
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    if method is None:
        raise ModelError(
            "config.json has a quantization_config that does not say its quant_method: download the file again, add "
            f"the method that made the checkpoint ({', '.join(sorted(methods()))}), or make a small one of the "
            "original weights with hotset pack --experts int4"
        )
    return str(getattr(method, "value", method))
