"""Peer: llama.cpp (the prebuilt wheel xllamacpp) on a memory-mapped GGUF of the same weights (gguf_export.py)."""

from __future__ import annotations

import argparse
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measure import Request, finish, flags, prompts, read_bytes


def parameters(options: argparse.Namespace) -> Any:
    """Mapped weights, nothing repacked to private memory, one request at a time, no prompt kept from the last."""
    import xllamacpp as llama

    found = llama.CommonParams()
    found.model.path = str(options.gguf)
    found.load_mode = llama.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    found.no_extra_bufts = True
    found.warmup = False  # it would touch every expert once
    found.fit_params = False
    found.n_ctx, found.n_parallel = 2048, 1
    found.cache_prompt, found.cache_ram_mib = False, 0
    found.n_ctx_checkpoints = 0
    for threads in (found.cpuparams, found.cpuparams_batch):
        threads.n_threads = options.threads
    return found


def answer(server: Any, ids: list[int], new_tokens: int) -> Request:
    """Greedy tokens of one prompt, given and returned as ids; llama.cpp itself times prefill and decode."""
    request = {"prompt": ids, "n_predict": new_tokens, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
    request |= {"stream": True, "logprobs": 1}  # ids are told only beside log-probabilities, which cost little
    tokens: list[int] = []
    read: list[int] = []
    last: dict[str, Any] = {}

    def receive(piece: dict[str, Any]) -> bool:
        last.update(piece)
        for choice in piece.get("choices", []):
            tokens.extend(entry["id"] for entry in (choice["logprobs"] or {}).get("content", []))
        read.append(read_bytes())
        return False

    server.handle_completions(request, receive)
    if "timings" not in last:
        raise SystemExit(f"llama.cpp did not answer: {last}")
    # Its clock of decode starts when prefill has yielded the first token, as ours does.
    times = last["timings"]
    return Request(len(ids), times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3, read[-1] - read[0], tokens)


def main() -> None:
    """Load, answer, report."""
    parser = flags(__doc__)
    parser.add_argument("--gguf", type=Path, help="the GGUF file; by default MODEL.gguf beside the folder")
    options = parser.parse_args()
    options.gguf = options.gguf or options.model.with_name(options.model.name + ".gguf")
    import xllamacpp as llama

    began = time.perf_counter()
    server = llama.Server(parameters(options))
    load_s = time.perf_counter() - began
    for ids in prompts(options) if options.warm else ():
        answer(server, ids, options.warm)
    requests = [answer(server, ids, options.tokens) for ids in prompts(options)]
    finish("llama.cpp", options, load_s, requests, versions=[version("xllamacpp")])


if __name__ == "__main__":
    main()
