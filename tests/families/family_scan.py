"""Which experts classes the installed transformers has, found by reading its source and not by a list of ours."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path

import transformers.models

# Families that run their experts with code of their own, and the class that holds the experts.
OWN_CODE = {
    "dbrx": "DbrxExperts",
    "jetmoe": "JetMoeParallelExperts",
    "llama4": "Llama4TextExperts",
    "longcat_flash": "LongcatFlashExperts",
    "nllb_moe": "NllbMoeExperts",
    "step3p7": "Step3p7Experts",
    "switch_transformers": "SwitchTransformersExperts",
}

# Expert classes that no tiny model is made for.
OUT_OF_SCOPE = {
    "DogeCDMoE": "16384 experts of one row each, held in embeddings: an offloaded embedding rather than experts",
    "VitPoseBackboneMoeMLP": "vision only; the index is the id of the data set, not a routing decision",
}

DECORATED = re.compile(r"^@use_experts_implementation(?:\([^)]*\))?\s*\nclass (\w+)", re.MULTILINE)


@cache
def decorated_classes() -> dict[str, str]:
    """Every class behind the experts interface, with the folder of transformers.models it lives in."""
    found = {}
    for path in sorted(Path(transformers.models.__file__).parent.glob("*/modeling_*.py")):
        if path.stem == f"modeling_{path.parent.name}":
            found |= dict.fromkeys(DECORATED.findall(path.read_text(encoding="utf-8")), path.parent.name)
    return found


@cache
def own_code_classes() -> dict[str, str]:
    """The experts classes outside the interface, with their folder."""
    decorated = decorated_classes()
    root = Path(transformers.models.__file__).parent
    return {c: f for f, c in OWN_CODE.items() if c not in decorated and (root / f).is_dir()}


def classes_of(folder: str) -> dict[str, type]:
    """The classes defined in one model folder's modeling file."""
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    return {n: c for n, c in vars(module).items() if isinstance(c, type) and c.__module__ == module.__name__}


def language_model(folder: str) -> type:
    """The class to test a folder with: the causal model, else the text tower, else the bare model."""
    classes = classes_of(folder)
    for ending in ("ForCausalLM", "TextModel", "Model"):
        found = [n for n in classes if n.endswith(ending) and not n.endswith("PreTrainedModel")]
        if found:
            return classes[found[0]]
    raise LookupError(f"no language model in {folder}")
