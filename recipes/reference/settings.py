"""What all steps of the recipe share: domains, seeds, places and the shape of the model."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORPUS = Path(os.environ.get("HOTSET_CORPUS", ROOT.parent / "shared" / "corpus"))
WORK = ROOT / "out" / "reference"  # scratch; git ignores it
SHIPPED = ROOT / "src" / "hotset" / "reference" / "model"

SEED = 20261115
DOMAINS = (
    "en_prose", "en_tech", "it", "de", "fr", "es", "ru", "ja", "zh", "python", "c", "json", "metamath", "latex",
)  # fmt: skip

VOCABULARY = 8192
END = "<|endoftext|>"
CONTEXT = 512  # tokens of a training sequence

# Sampling weight of a domain: its tokens to this power, so that small domains are neither drowned nor memorised.
BALANCE = 0.5
REDUNDANT = {"json": 0.5}  # records of one database that all look alike

MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,  # of dense layers; there are none
    "moe_intermediate_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "router_aux_loss_coef": 0.01,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
