"""Puts the trained model together as it ships: one safetensors file in bfloat16, config, tokenizer, digest."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from settings import SHIPPED, WORK

_MAX_BYTES = 36_000_000


def main() -> None:
    """Merge the shards, add the tokenizer, and write down what the weights hash to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, default=WORK / "weights")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.weights, dtype=torch.bfloat16)
    model.config.tie_word_embeddings = True
    model.save_pretrained(SHIPPED, max_shard_size="100MB")
    AutoTokenizer.from_pretrained(WORK / "tokenizer").save_pretrained(SHIPPED)
    (SHIPPED / "training.json").write_bytes((args.weights / "training.json").read_bytes())
    digest = hashlib.sha256((SHIPPED / "model.safetensors").read_bytes()).hexdigest()
    (SHIPPED / "digest.json").write_text(json.dumps({"model.safetensors": digest}) + "\n")
    size = sum(path.stat().st_size for path in SHIPPED.iterdir())
    print(f"{size:,} bytes in {SHIPPED}, sha256 {digest}")
    if size > _MAX_BYTES:
        raise SystemExit("too large to ship")


if __name__ == "__main__":
    main()
