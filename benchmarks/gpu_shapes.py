"""Models of published shapes with random weights, made on the GPU without a checkpoint, and their routing forced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hotset.trace import Trace


@dataclass(frozen=True)
class Shape:
    """A published model: how to configure it, and the routing that is forced upon it."""

    name: str
    config: str
    options: dict[str, Any]
    routing: str


SHAPES = {
    "gpt-oss-20b": Shape(
        "gpt-oss-20b",
        "GptOssConfig",
        {
            "num_hidden_layers": 24,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "head_dim": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 201088,
            "sliding_window": 128,
            "tie_word_embeddings": False,
        },
        "its own, recorded: the public trace of gpt-oss-20b",
    ),
    "qwen3-30b-a3b": Shape(
        "qwen3-30b-a3b",
        "Qwen3MoeConfig",
        {
            "num_hidden_layers": 48,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "norm_topk_prob": True,
        },
        "synthetic: hotset.trace.synth with its defaults (6 topics), 48 x 128, top 8",
    ),
}


def empty_model(shape: Shape, implementation: str = "grouped_mm") -> Any:
    """The model without memory."""
    import transformers

    config = getattr(transformers, shape.config)(**shape.options)
    config._attn_implementation = "sdpa" if shape.config == "Qwen3MoeConfig" else "eager"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.config._experts_implementation = implementation
    return model.eval()


@torch.no_grad()
def materialise(model: Any, device: str) -> Any:
    """Give every parameter that the model still has memory and small random values."""
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        elif device == "cpu":
            parameter.fill_(0.01)  # random numbers for tens of gigabytes would take the CPU minutes
        else:
            parameter.normal_(std=0.02)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length, 5 ms each, and would drown the rest
    inner = model.model
    inner.rotary_emb = type(inner.rotary_emb)(model.config).to(device)
    return model


class ForcedRouting:
    """Makes every router choose the experts of a recorded trace, token after token."""

    def __init__(self, model: Any, trace: Trace, device: str) -> None:
        self.plan = torch.from_numpy(trace.experts.astype(np.int64)).to(device)  # [tokens, layers, top_k]
        self.token = -1
        self.handles = [model.register_forward_pre_hook(self._next)]
        routers = [m for name, m in model.named_modules() if name.endswith((".mlp.gate", ".mlp.router"))]
        for layer, router in enumerate(routers):
            self.handles.append(router.register_forward_hook(self._force(layer)))

    def _next(self, _: Any, __: Any) -> None:
        self.token = (self.token + 1) % len(self.plan)

    def _force(self, layer: int) -> Any:
        def hook(_: Any, __: Any, outputs: Any) -> Any:
            logits, weights, _index = outputs
            return logits, weights, self.plan[self.token, layer].unsqueeze(0)

        return hook

    def remove(self) -> None:
        """Let the routers decide again."""
        for handle in self.handles:
            handle.remove()


class Decoder:
    """One sequence that grows token by token."""

    def __init__(self, model: Any, device: str) -> None:
        from transformers import DynamicCache

        self.model = model
        self.cache = DynamicCache(config=model.config)
        self.ids = torch.tensor([[17]], device=device)

    @torch.no_grad()
    def step(self, tokens: int) -> None:
        """Decode so many tokens."""
        for _ in range(tokens):
            out = self.model(input_ids=self.ids, past_key_values=self.cache, use_cache=True)
            self.ids = out.logits[:, -1:].argmax(-1)
