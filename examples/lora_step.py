"""Train a low-rank adapter on attention while the experts stay on disk, frozen.

python examples/lora_step.py
"""

from __future__ import annotations

import torch
from transformers import AutoTokenizer

import hotset

STEPS, RANK = 3, 4


class LowRank(torch.nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, RANK, bias=False, dtype=base.weight.dtype)
        self.up = torch.nn.Linear(RANK, base.out_features, bias=False, dtype=base.weight.dtype)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output with the correction."""
        return self.base(hidden) + self.up(self.down(hidden))


def main() -> None:
    """Take a few steps on one sentence and print the loss."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(hotset.reference.path())
    model = hotset.load(hotset.reference.path(), memory="25%", device="cpu", dtype="float32").requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    ids = tokenizer("Il set caldo sta in memoria, il resto sul disco.", return_tensors="pt").input_ids
    with model.hotset:
        for step in range(STEPS):
            loss = model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()  # gradients pass through experts, which are fetched once more
            optimizer.step()
            print(f"step {step}: loss {loss.item():.3f}")
        backward = model.hotset.stats()["backward"]
    print(f"{sum(w.numel() for w in trained)} weights trained; backward passes fetched {backward['fetched']} experts")


if __name__ == "__main__":
    main()
