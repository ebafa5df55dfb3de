"""Peer: transformers as it is. It maps the experts of a fused checkpoint (fuse.py), and copies all others together."""

from __future__ import annotations

import time

from measure import finish, flags, greedy, prompts


def main() -> None:
    """Load, answer, report."""
    parser = flags(__doc__)
    parser.add_argument("--experts", default="grouped_mm", help="transformers' experts_implementation")
    options = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    began = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.bfloat16, experts_implementation=options.experts
    ).eval()
    load_s = time.perf_counter() - began
    requests = [greedy(model, ids, options.tokens) for ids in prompts(options)]
    finish("transformers", options, load_s, requests, experts=options.experts, versions=[torch.__version__])


if __name__ == "__main__":
    main()
