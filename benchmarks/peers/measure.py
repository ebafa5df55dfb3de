"""What the peers share: flags, prompts, the greedy loop, and the one line of JSON that each prints last."""

from __future__ import annotations

import argparse
import json
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hotset import reference


@dataclass(frozen=True)
class Request:
    """One prompt answered: prefill yields the first token, decode all others."""

    prompt_tokens: int
    prefill_s: float
    decode_s: float
    decode_read_bytes: int
    tokens: list[int]


def flags(description: str) -> argparse.ArgumentParser:
    """The flags that every peer takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--workload", default="it", help="a workload of hotset.reference")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens per prompt")
    parser.add_argument("--prompts", type=int, default=2, help="how many prompts of the workload")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--warm", type=int, default=0, help="tokens of each prompt that are answered before the clock runs"
    )
    return parser


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """The token ids of the first prompts, by the checkpoint's own tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    texts = reference.workload(options.workload).prompts[: options.prompts]
    return [tokenizer.encode(prompt.text).ids for prompt in texts]


def read_bytes() -> int:
    """Bytes that this process made the disk deliver: buffered, mapped or direct."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def greedy(model: Any, ids: list[int], new_tokens: int) -> Request:
    """Answer one prompt with a transformers model; the end token is a token like any other."""
    import torch

    with torch.inference_mode():
        began = time.perf_counter()
        out = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        tokens = [int(out.logits[0, -1].argmax())]
        prefilled, read = time.perf_counter(), read_bytes()
        while len(tokens) < new_tokens:
            out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
            tokens.append(int(out.logits[0, -1].argmax()))
    ended = time.perf_counter()
    return Request(len(ids), prefilled - began, ended - prefilled, read_bytes() - read, tokens)


def finish(peer: str, options: argparse.Namespace, load_s: float, requests: list[Request], **more: Any) -> None:
    """Print the result as one line of JSON."""
    steps = sum(len(request.tokens) - 1 for request in requests)
    result = {
        "peer": peer,
        "workload": options.workload,
        "threads": options.threads,
        "decode_tokens_per_s": steps / sum(request.decode_s for request in requests),
        "load_s": load_s,
        "prefill_s": sum(request.prefill_s for request in requests),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "read_bytes": read_bytes(),
        "decode_read_bytes_per_token": sum(request.decode_read_bytes for request in requests) / max(steps, 1),
        **more,
        "requests": [asdict(request) for request in requests],
    }
    print(json.dumps(result), flush=True)
