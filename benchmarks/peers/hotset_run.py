"""The checkpoint through hotset, with a budget for its experts."""

from __future__ import annotations

import time

import torch
from transformers.utils import logging

import hotset

from measure import finish, flags, greedy, prompts


def main() -> None:
    """Load, answer and report."""
    parser = flags(__doc__ or "")
    parser.add_argument("--memory", default="25%")
    parser.add_argument("--policy", default="blend")
    parser.add_argument("--readers", type=int, default=0, help="reader threads; 0 lets hotset choose")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    began = time.perf_counter()
    model = hotset.load(
        options.model, memory=options.memory, policy=options.policy, device="cpu", threads=options.readers
    )
    load_s = time.perf_counter() - began
    for ids in prompts(options) if options.warm else ():
        greedy(model, ids, options.warm)
    requests = [greedy(model, ids, options.tokens) for ids in prompts(options)]
    stats = model.hotset.stats()
    chosen = ("slots", "resident_bytes", "hit_rate", "stall_share", "stall_s", "experts_s", "pass_s", "loaded_bytes")
    figures = {key: stats[key] for key in chosen} | {"decode_hit_rate": stats["decode"]["hit_rate"]}
    model.hotset.close()
    finish("hotset", options, load_s, requests, policy=options.policy, memory=options.memory, **figures)


if __name__ == "__main__":
    main()
