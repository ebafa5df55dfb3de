"""Learn what a workload uses, keep it in a profile, and start warm from it.

python examples/warm_start.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import hotset


def generate(prompt: str, **options: Any) -> dict[str, Any]:
    """Continue a prompt with a fresh model under some options, and say how its cache did."""
    tokenizer = AutoTokenizer.from_pretrained(hotset.reference.path())
    model = hotset.load(hotset.reference.path(), memory="25%", **options)
    with model.hotset:
        model.hotset.wait_until_warm(30)
        ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
        model.generate(ids, max_new_tokens=24, do_sample=False)
        stats: dict[str, Any] = model.hotset.stats()
        return stats


def main() -> None:
    """Compare a cold and a warm start on a prompt that the profile has not seen."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "italian.safetensors"
        generate("La città di Roma", learn=profile)  # saved when the model is closed
        cold = generate("Per installare il programma")
        warm = generate("Per installare il programma", profile=profile)
    for name, stats in (("cold", cold), ("warm", warm)):
        print(
            f"{name}: the prompt hit {stats['prefill']['hit_rate']:.0%}, decode {stats['decode']['hit_rate']:.0%}, "
            f"{stats['loaded_bytes'] / 1e6:.1f} MB were waited for, {stats['background_bytes'] / 1e6:.1f} MB preloaded"
        )


if __name__ == "__main__":
    main()
