"""Load a model with a quarter of its experts in memory and generate text.

python examples/generate.py [MODEL]
"""

from __future__ import annotations

import sys

from transformers import AutoTokenizer

import hotset


def main() -> None:
    """Continue one prompt, and say what it cost."""
    path = sys.argv[1] if len(sys.argv) > 1 else hotset.reference.path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = hotset.load(path, memory="25%")  # or "8GiB", "1536 slots", "auto"
    ids = tokenizer("La storia della città", return_tensors="pt").input_ids.to(model.device)
    with model.hotset:  # closes the model at the end: threads, files and slots
        text = model.generate(ids, max_new_tokens=24, do_sample=False)
        stats = model.hotset.stats()
    print(tokenizer.decode(text[0]))
    print(f"{stats['slots']} of {stats['shape']['layers'] * stats['shape']['experts']} experts fit into the cache")
    print(
        f"decode hit rate {stats['decode']['hit_rate']:.0%}, {stats['bytes_per_token'] / 1e6:.1f} MB loaded per token"
    )


if __name__ == "__main__":
    main()
