"""Gradients at random: tiny models of all families, random settings, each compared with stock parameter by parameter.

    python benchmarks/trust/gradients.py --count 300 --seed 1

Every try attaches hotset to a tiny model under a random budget, policy, scope and prefetch, in eval or training mode,
with one of the two kinds of gradient checkpointing or none, and computes the gradients of all parameters but the
experts'. A try is right if each gradient is stock's within 1e-4 of its norm, or 1e-7 of that of the largest: small ones
are what large ones leave when they cancel out. After the backward pass the slots must hold what they held before, and
hits and misses must be those of the forward pass.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "families"))
import tiny_models as tiny
from exactness import NO_REFERENCE

import hotset
from hotset.errors import HotsetError

from common import publish

SETTINGS: dict[str, list[Any]] = {
    "memory": ["25%", "50%", "75%"],
    "policy": ["blend", "lru", "slru"],
    "scope": ["layer", "pool"],
    "prefetch": ["off", "auto"],
    "threads": [1, 2, 4],
}
TOLERANCE, NOISE = 1e-4, 1e-7
Gradients = dict[str, Any]


def loss_of(model: Any, given: dict[str, Any]) -> Any:
    """A number that depends on every logit."""
    torch.manual_seed(3)
    with tiny.quiet():
        out = model(**given)
    found = out.logits if getattr(out, "logits", None) is not None else out.last_hidden_state
    push = torch.randn(found.shape, generator=torch.Generator().manual_seed(0))
    return (found * push).sum()


def gradients(model: Any) -> Gradients:
    """The gradients of all parameters that have some."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def prepared(model: Any, training: bool, checkpointing: bool | None) -> Any:
    """The model in its mode."""
    if training and checkpointing is not None and model.supports_gradient_checkpointing:
        with suppress(ValueError):  # some parts of a model say that they do not support it after all
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
    return model.train(training)


@cache
def stock_gradients(name: str, training: bool, checkpointing: bool | None) -> Gradients:
    """What transformers computes."""
    model = prepared(tiny.make(name), training, checkpointing)
    loss_of(model, tiny.inputs(name, model)).backward()
    return gradients(model)


def attempt(name: str, training: bool, checkpointing: bool | None, options: dict[str, Any]) -> str:
    """One try, in a word: right, refused, or what went wrong."""
    wanted = stock_gradients(name, training, checkpointing)
    model = prepared(hotset.attach(tiny.make(name), **options), training, checkpointing)
    with model.hotset as handle:
        try:
            loss = loss_of(model, tiny.inputs(name, model))
        except HotsetError:
            return "refused"
        before, held = handle.stats(), handle.engine.controller.table.slot_of.copy()
        loss.backward()
        after, found = handle.stats(), gradients(model)
        if set(found) != set(wanted) & {key for key, _ in model.named_parameters()}:
            return "another set of gradients"
        if any(before[key] != after[key] for key in ("hits", "misses", "asked", "loaded_bytes")):
            return "the books changed"
        if (held != handle.engine.controller.table.slot_of).any():
            return "the slots changed"
        if all(torch.equal(value, wanted[key]) for key, value in found.items()):
            return "bit-equal"
        return "right" if _near(found, wanted) else "wrong"


def _near(found: Gradients, wanted: Gradients) -> bool:
    largest = max(float(value.norm()) for value in wanted.values())
    return all(
        float((value - wanted[key]).norm()) <= TOLERANCE * float(wanted[key].norm()) + NOISE * largest
        for key, value in found.items()
    )


def main() -> None:
    """Try, count, and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("names", nargs="*")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    names = chosen.names or [name for name in tiny.families() if name not in NO_REFERENCE]
    draw, counts, faults = random.Random(chosen.seed), Counter[str](), list[str]()  # noqa: S311
    for number in range(chosen.count):
        options = {key: draw.choice(values) for key, values in SETTINGS.items()}
        training, checkpointing = draw.random() < 0.5, draw.choice([None, True, False])
        name = names[number % len(names)]
        what = f"{name} training={training} checkpointing={checkpointing} {options}"
        try:
            verdict = attempt(name, training, checkpointing, options)
        except Exception as error:
            verdict = f"{type(error).__name__}: {error}".split("\n")[0][:200]
        counts[verdict if verdict in ("bit-equal", "right", "refused") else "wrong"] += 1
        if verdict not in ("bit-equal", "right", "refused"):
            faults.append(f"{what}: {verdict}")
            print(faults[-1], flush=True)
    figures = {"seed": chosen.seed, "families": len(names), "tries": chosen.count, "counts": dict(counts)}
    print(figures)
    versions = {name: version(name) for name in ("torch", "transformers")}
    if not chosen.names:
        publish("trust_gradients", figures | {"faults": faults, "versions": versions})
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
