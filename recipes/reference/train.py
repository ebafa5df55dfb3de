"""Trains the model. Runs for a given time, keeps its place on disk, and goes on from there when run again.

python train.py --seconds 540 --plan 1080        first half of a plan of 1,080 seconds
python train.py --seconds 540 --plan 1080        second half: the learning rate ends its cosine here
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from settings import BALANCE, CONTEXT, DOMAINS, MODEL, REDUNDANT, SEED, WORK

BATCH = 128
PEAK_RATE, LAST_RATE, WARM_UP = 2e-3, 4e-5, 200
BALANCING = MODEL["router_aux_loss_coef"]


class Batches:
    """Random stretches of the domains' token streams, on the device."""

    def __init__(self, tokens: Any, device: str) -> None:
        self.streams = {d: torch.from_numpy(tokens[f"train_{d}"].astype(np.int32)).to(device) for d in DOMAINS}
        weights = np.array([len(self.streams[d]) ** BALANCE * REDUNDANT.get(d, 1.0) for d in DOMAINS])
        self.shares = weights / weights.sum()
        self.device = device
        self.reach = torch.arange(CONTEXT + 1, device=device)

    def draw(self, rng: np.random.Generator) -> torch.Tensor:
        """One batch, every domain by its share."""
        counts = rng.multinomial(BATCH, self.shares)
        rows = []
        for domain, count in zip(DOMAINS, counts, strict=True):
            stream = self.streams[domain]
            starts = torch.from_numpy(rng.integers(0, len(stream) - CONTEXT - 1, count)).to(self.device)
            rows.append(stream[starts[:, None] + self.reach])
        return torch.cat(rows).long()


def make_model(device: str) -> Qwen3MoeForCausalLM:
    """The model with fresh weights."""
    torch.manual_seed(SEED)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MODEL, architectures=["Qwen3MoeForCausalLM"]))
    model.set_experts_implementation("grouped_mm")
    return model.to(device, torch.bfloat16)


def losses(model: Qwen3MoeForCausalLM, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy, and how unevenly the whole batch, all domains together, uses each layer's experts."""
    out = model.model(input_ids=batch[:, :-1], use_cache=False, output_router_logits=True)
    logits = model.lm_head(out.last_hidden_state).flatten(0, 1)
    text = F.cross_entropy(logits.float(), batch[:, 1:].flatten())
    return text, torch.stack([_imbalance(router) for router in out.router_logits]).mean()


def _imbalance(router_logits: torch.Tensor) -> torch.Tensor:
    """Switch Transformer's balancing loss of one layer; 1 when all experts are used alike."""
    probabilities = router_logits.float().flatten(0, -2).softmax(-1)
    chosen = probabilities.topk(MODEL["num_experts_per_tok"]).indices
    use = torch.bincount(chosen.flatten(), minlength=MODEL["num_experts"]).float() / chosen.numel()
    return MODEL["num_experts"] * (use * probabilities.mean(0)).sum()


class Optimizer:
    """AdamW on float32 copies of the bfloat16 weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.live = [p for p in model.parameters() if p.requires_grad]
        self.master = [p.detach().float().clone() for p in self.live]
        matrices = [m for m in self.master if m.dim() > 1]
        vectors = [m for m in self.master if m.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Clip, update the copies, and round them back into the model."""
        for group in self.adam.param_groups:
            group["lr"] = rate
        for live, master in zip(self.live, self.master, strict=True):
            master.grad = live.grad.float()
            live.grad = None
        torch.nn.utils.clip_grad_norm_(self.master, 1.0)
        self.adam.step()
        torch._foreach_copy_(self.live, self.master)


def learning_rate(step: int, progress: float) -> float:
    """A short warm-up, then a cosine over the whole plan."""
    cosine = LAST_RATE + (PEAK_RATE - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return cosine * min(1.0, (step + 1) / WARM_UP)


@torch.no_grad()
def validate(model: Qwen3MoeForCausalLM, tokens: Any, device: str, rows: int = 48) -> dict[str, float]:
    """Loss of every domain on text that was held out, in nats per token."""
    found = {}
    for domain in DOMAINS:
        stream = torch.from_numpy(tokens[f"valid_{domain}"].astype(np.int64)).to(device)
        whole = min(len(stream) // (CONTEXT + 1), rows)
        batch = stream[: whole * (CONTEXT + 1)].view(whole, CONTEXT + 1)
        found[domain] = round(float(losses(model, batch)[0]), 4)
    return found


def run(args: argparse.Namespace) -> None:
    """Train until the time is up, saving on the way out."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = dict(np.load(args.tokens))
    model, batches = make_model(device), Batches(tokens, device)
    place, state = args.work / "checkpoint.pt", {"step": 0, "trained_s": 0.0}
    optimizer = Optimizer(model)
    if place.exists():
        state = resume(place, optimizer, device)
    elif args.weights.exists():  # another machine: the weights came along, the optimizer's memory did not
        state = restart(args.weights, model, optimizer)
    rng = np.random.default_rng(SEED + state["step"])
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, from step {state['step']}", flush=True)
    began = said = time.perf_counter()
    before = state["trained_s"]
    while time.perf_counter() - began < args.seconds and state["trained_s"] < args.plan:
        state["trained_s"] = before + time.perf_counter() - began
        text, balance = losses(model, batches.draw(rng))
        (text + BALANCING * balance).backward()
        optimizer.step(learning_rate(state["step"], state["trained_s"] / args.plan))
        state["step"] += 1
        if time.perf_counter() - said > 60 or state["step"] == 20:
            said = time.perf_counter()
            report(model, tokens, device, state, text, balance)
    finish(args, model, optimizer, state, validate(model, tokens, device, rows=10_000))


def report(model: Any, tokens: Any, device: str, state: dict[str, Any], text: Any, balance: Any) -> None:
    """One line a minute."""
    held_out = validate(model, tokens, device)
    mean = sum(held_out.values()) / len(held_out)
    print(
        f"step {state['step']}  {state['trained_s']:.0f} s  train {text.item():.3f}  balance {balance.item():.3f}  "
        f"held out {mean:.3f}  {held_out}",
        flush=True,
    )


def resume(place: Path, optimizer: Optimizer, device: str) -> dict[str, Any]:
    """Take up exactly where the last run stopped."""
    saved = torch.load(place, map_location=device, weights_only=True)
    optimizer.adam.load_state_dict(saved["adam"])
    for live, master, kept in zip(optimizer.live, optimizer.master, saved["master"], strict=True):
        master.copy_(kept)
        live.data.copy_(kept)
    return dict(saved["state"])


def restart(weights: Path, model: Any, optimizer: Optimizer) -> dict[str, Any]:
    """Take up from exported weights."""
    loaded = Qwen3MoeForCausalLM.from_pretrained(weights, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    for live, master in zip(optimizer.live, optimizer.master, strict=True):
        master.copy_(live.detach().float())
    return dict(json.loads((weights / "training.json").read_text())["state"])


def finish(args: argparse.Namespace, model: Any, optimizer: Optimizer, state: Any, held_out: dict[str, float]) -> None:
    """Keep the place, and export the weights with what they reach."""
    args.work.mkdir(parents=True, exist_ok=True)
    saved = {"state": state, "adam": optimizer.adam.state_dict(), "master": optimizer.master}
    torch.save(saved, args.work / "checkpoint.pt")
    model.save_pretrained(args.out, max_shard_size="12MB")
    record = {"state": state, "plan_s": args.plan, "held_out": held_out, "torch": torch.__version__, "batch": BATCH}
    (args.out / "training.json").write_text(json.dumps(record, indent=1))
    print(json.dumps(record))


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=540, help="stop after this time")
    parser.add_argument("--plan", type=float, default=1080, help="training time that the learning rate is planned for")
    parser.add_argument("--tokens", type=Path, default=WORK / "tokens.npz")
    parser.add_argument("--work", type=Path, default=WORK, help="where the full state is kept between runs")
    parser.add_argument("--weights", type=Path, default=WORK / "weights", help="exported weights to go on from")
    parser.add_argument("--out", type=Path, default=WORK / "weights", help="where weights are exported")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
