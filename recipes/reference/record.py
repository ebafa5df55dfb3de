"""Runs every workload through the model and records its routing, with predictions of layers ahead.

python record.py            all workloads
python record.py it c       some of them
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hotset import reference
from hotset.shape import ModelShape
from hotset.trace import Phase, Trace

from settings import SEED

NEW_TOKENS = 32
MEMORY = 128  # tokens of the conversation that a later turn of a chat still sees
DISTANCES = 3
TEMPERATURE = 0.8


class Recorder:
    """Hooks on all routers; keeps what they chose and what later routers would have chosen on the same input."""

    def __init__(self, model: Any) -> None:
        self.routers = [layer.mlp.gate for layer in model.model.layers]
        self.rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.chosen: list[Any] = []
        for index, router in enumerate(self.routers):
            router.register_forward_hook(self._hook(index))

    def _hook(self, index: int) -> Any:
        def note(_: Any, inputs: Any, outputs: Any) -> None:
            if index == 0:
                self._start(len(outputs[2]))
            self.experts[:, index] = outputs[2].numpy()
            self.weights[:, index] = outputs[1].float().numpy()
            for distance in range(1, DISTANCES + 1):
                if index + distance < len(self.routers):
                    ahead = self.routers[index + distance].forward(inputs[0])[2]
                    self.predictions[:, index + distance, distance - 1] = ahead.numpy()
            if index == len(self.routers) - 1:
                self.rows.append((self.experts, self.weights, self.predictions))

        return note

    def _start(self, tokens: int) -> None:
        layers, top_k = len(self.routers), self.routers[0].top_k
        self.experts = np.full((tokens, layers, top_k), -1, np.int16)
        self.weights = np.zeros((tokens, layers, top_k), np.float16)
        self.predictions = np.full((tokens, layers, DISTANCES, top_k), -1, np.int16)


@torch.no_grad()
def generate(model: Any, ids: list[int], random: torch.Generator) -> list[int]:
    """Sample new tokens after the prompt; returns those that were also fed back, so that every one has a row."""
    fed: list[int] = []
    out = model(torch.tensor([ids]), use_cache=True)
    for _ in range(NEW_TOKENS):
        probabilities = torch.softmax(out.logits[0, -1].float() / TEMPERATURE, -1)
        fed.append(int(torch.multinomial(probabilities, 1, generator=random)))
        out = model(torch.tensor([[fed[-1]]]), past_key_values=out.past_key_values, use_cache=True)
    return fed


def record(name: str, model: Any, tokenizer: Any, recorder: Recorder) -> Trace:
    """Run one workload and gather what the routers did."""
    random = torch.Generator().manual_seed(SEED)
    recorder.rows.clear()
    request, step, phase, token_ids = [], [], [], []
    labels, passes, memory, session = [], 0, [], None
    for number, prompt in enumerate(reference.workload(name).prompts):
        memory = memory if prompt.session == session else []
        session = prompt.session
        ids = memory[-MEMORY:] + tokenizer(prompt.text).input_ids
        fed = generate(model, ids, random)
        memory = ids + fed
        token_ids += ids + fed
        request += [number] * (len(ids) + len(fed))
        phase += [Phase.PREFILL] * len(ids) + [Phase.DECODE] * len(fed)
        step += [passes] * len(ids) + list(range(passes + 1, passes + 1 + len(fed)))
        passes += 1 + len(fed)
        labels.append({"domain": prompt.domain, "session": f"{name}-{prompt.session}"})
    experts, weights, predictions = (np.concatenate(column) for column in zip(*recorder.rows, strict=True))
    return Trace(
        shape=shape_of(model),
        experts=experts,
        request=np.array(request, np.int32),
        step=np.array(step, np.int32),
        phase=np.array(phase, np.uint8),
        weights=weights,
        token_ids=np.array(token_ids, np.int32),
        predictions=predictions,
        labels=tuple(labels),
        meta={"model": "hotset reference model", "source": f"recipes/reference/record.py {name}"},
    )


def shape_of(model: Any) -> ModelShape:
    """The model's shape; an expert is three matrices in bfloat16."""
    c = model.config
    size = 3 * c.hidden_size * c.moe_intermediate_size * 2
    return ModelShape(c.num_hidden_layers, c.num_experts, c.num_experts_per_tok, size)


def main() -> None:
    """Record and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=reference.workloads())
    parser.add_argument("--out", type=Path, default=reference.trace_path("it").parent)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(reference.path())
    model = AutoModelForCausalLM.from_pretrained(reference.path(), dtype=torch.float32).eval()
    recorder = Recorder(model)
    for name in args.names:
        trace = record(name, model, tokenizer, recorder)
        trace.save(args.out / f"{name}.safetensors")
        print(f"{name:>9} {trace.tokens:>6,} tokens of {trace.requests} requests", flush=True)


if __name__ == "__main__":
    main()
