"""A tiny random model of every Mixture-of-Experts family the installed transformers has.

``python tests/families/tiny_models.py [name ...]`` makes, runs, saves and reloads each of them, one line per family.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from family_scan import classes_of, decorated_classes, language_model, own_code_classes
from tiny_configs import EXPERTS, HIDDEN, VOCAB, ZERO_EXPERTS, tiny_config
from torch import nn

# Families whose class is not the one found by its name's ending.
MODEL_CLASSES = {
    "mistral_large4": "MistralLarge4ForConditionalGeneration",  # its text tower cannot be loaded by itself
    "nllb_moe": "NllbMoeForConditionalGeneration",
    "openai_privacy_filter": "OpenAIPrivacyFilterForTokenClassification",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerTextModel",
    "qwen3_omni_moe/talker": "Qwen3OmniMoeTalkerModel",
    "switch_transformers": "SwitchTransformersForConditionalGeneration",
}
COMPOSITES = {
    "qwen3_vl_moe/composite": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5_moe/composite": "Qwen3_5MoeForConditionalGeneration",
}


class ExpertWeights(NamedTuple):
    """One expert of one layer: the name of its experts module, its number, and views of its weights."""

    module: str
    expert: int
    tensors: list[torch.Tensor]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what the library says about tiny settings and about kernels that are not installed."""
    verbosity = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()


@cache
def families() -> list[str]:
    """The names of all families, sorted, composites among them."""
    folders = set(decorated_classes().values()) | set(own_code_classes().values())
    extra = {name for name in [*MODEL_CLASSES, *COMPOSITES] if name.partition("/")[0] in folders}
    return sorted(folders | extra)


@cache
def model_class(name: str) -> type:
    """The model class of a family."""
    folder = name.partition("/")[0]
    chosen = (MODEL_CLASSES | COMPOSITES).get(name)
    return classes_of(folder)[chosen] if chosen else language_model(folder)


def can_generate(name: str) -> bool:
    """Whether the family's class has ``generate``."""
    return bool(model_class(name).can_generate())


def auto_class(name: str) -> type:
    """The class to load the family's checkpoint with: the automatic one where that finds the same model."""
    found = model_class(name)
    with quiet():
        config = tiny_config(name, found.config_class)
    causal = transformers.AutoModelForCausalLM
    return causal if causal._model_mapping.get(type(config), None) is found else found


def make(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A tiny random model of the family, in evaluation mode and float32; ``changes`` go to its config."""
    found = model_class(name)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = found(tiny_config(name, found.config_class, **changes)).to(torch.float32).eval()
        lively(model)
    return model


def inputs(name: str, model: nn.Module, batch: int = 2, tokens: int = 7) -> dict[str, torch.Tensor]:
    """What to call the model with: text only, the same at every call."""
    ids = torch.randint(3, VOCAB // 2, (batch, tokens), generator=torch.Generator().manual_seed(1))
    if (
        name == "qwen3_omni_moe/talker"
    ):  # it is fed the thinker's hidden states, and has no embedding under the usual name
        return {"inputs_embeds": nn.functional.one_hot(ids % HIDDEN, HIDDEN).float() * 4}
    given = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids.flip(1)
    return given


def logits(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's logits, or its last hidden state where it has no head."""
    with quiet(), torch.no_grad():
        out = model(**given)
    return out.logits if getattr(out, "logits", None) is not None else out.last_hidden_state


def save(name: str, folder: Path | str, seed: int = 0) -> None:
    """Write the family's checkpoint as the library itself would."""
    model = make(name, seed)
    with quiet():
        model.save_pretrained(folder)


def load(name: str, folder: Path | str, **options: Any) -> nn.Module:
    """Read the checkpoint back with the stock library, into memory aligned as that of a fresh model.

    The library leaves weights it need not convert in the mapped file at whatever offset they have there, and the CPU's
    matrix product rounds differently by the alignment of its operands: equal weights, logits apart by 1e-6.
    """
    with quiet():
        model = auto_class(name).from_pretrained(folder, **options).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold routed experts, by name, in the order of the model."""
    names = decorated_classes().keys() | own_code_classes().keys()
    return {name: module for name, module in model.named_modules() if type(module).__name__ in names}


def expert_weights(model: nn.Module) -> Iterator[ExpertWeights]:
    """Views of the weights of every expert, whichever way the family stores them."""
    for name, module in experts_modules(model).items():
        stacked = [p.data for p in module.parameters() if p.dim() >= 2]
        for expert in range(EXPERTS):
            own = [p.data for key, p in module.named_parameters() if key.startswith(f"expert_{expert}.")]
            rows = [p if p.dim() == 3 else p.view(EXPERTS, -1, p.shape[-1]) for p in stacked if not own]
            yield ExpertWeights(name, expert, own or [p[expert] for p in rows])


def lively(model: nn.Module) -> None:
    """Draw weights large enough that tokens differ in their routing and experts differ in their output.

    With the library's own spread of 0.02 all logits are nearly equal, and no test on such a model could fail.
    """
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    experts = {id(p) for module in experts_modules(model).values() for p in module.parameters()}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        fan_in = parameter.shape[-1] if parameter.dim() != 3 or id(parameter) in experts else parameter[0].numel()
        if id(parameter) in experts:
            nn.init.normal_(parameter, std=2 / math.sqrt(fan_in))
        elif id(parameter) in embeddings:
            nn.init.normal_(parameter, std=0.5 if tied else 1.0)
        elif parameter.dim() >= 2 and name.endswith("weight"):
            is_router = parameter.shape[0] in (EXPERTS, EXPERTS + ZERO_EXPERTS) and parameter.dim() == 2
            nn.init.normal_(parameter, std=(1.5 if is_router else 1) / math.sqrt(fan_in))
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.rand(buffer.shape[0], EXPERTS).argsort(-1)[:, : buffer.shape[1]])
        elif name.endswith(("correction_bias", "expert_bias")):
            nn.init.normal_(buffer, std=0.05)


def experts_matter(model: nn.Module, given: dict[str, torch.Tensor]) -> float:
    """The share of (layer, expert) pairs without which the logits would change clearly."""
    before = logits(model, given)
    clear = []
    for expert in expert_weights(model):
        kept = [tensor.clone() for tensor in expert.tensors]
        for tensor in expert.tensors:
            tensor.zero_()
        change = (logits(model, given) - before).abs().max()
        for tensor, value in zip(expert.tensors, kept, strict=True):
            tensor.copy_(value)
        clear.append(bool(change > 1e-3 * before.std()))
    return sum(clear) / len(clear)


def check(name: str) -> str:
    """Make, run, save and reload one family; say how it went."""
    model = make(name)
    given = inputs(name, model)
    before = logits(model, given)
    with tempfile.TemporaryDirectory() as folder:
        with quiet():
            model.save_pretrained(folder)
        again = logits(load(name, folder), given)
    layers = len(experts_modules(model))
    verdict = "ok" if torch.equal(before, again) and before.isfinite().all() else "NOT EQUAL"
    return (
        f"{verdict} {type(model).__name__} via {auto_class(name).__name__}: {layers} experts modules, "
        f"std {before.std():.2f}, max|d| {(before - again).abs().max():.1e}, matter {experts_matter(model, given):.2f}"
    )


def main() -> None:
    """Check the families named on the command line, or all."""
    began = time.perf_counter()
    torch.set_num_threads(1)  # tiny products only wait for one another on a shared machine
    for name in sys.argv[1:] or families():
        start = time.perf_counter()
        try:
            line = check(name)
        except Exception as error:
            line = f"FAILED {type(error).__name__}: {error}".replace("\n", " ")[:400]
        print(f"{name:28} {time.perf_counter() - start:5.2f} s  {line}", flush=True)
    print(f"{len(sys.argv[1:] or families())} families in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
