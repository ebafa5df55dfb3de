"""What the shipped model and its traces are like, in numbers and plots: for docs/results/reference-model.md.

python recipes/reference/evidence.py        writes benchmarks/results/reference_model.json and docs/images/reference
"""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from hotset import reference
from hotset.cache import Controller, SlotPlan
from hotset.files import write_beside
from hotset.policies import parse
from hotset.sim import Sweep, simulate
from hotset.trace import Phase, Trace

import evidence_plots
from settings import CONTEXT, ROOT, SHIPPED, WORK

RESULT = ROOT / "benchmarks" / "results" / "reference_model.json"
IMAGES = ROOT / "docs" / "images" / "reference"
LAGS = (1, 2, 4, 8, 16)
POLICIES = ("lru", "lfru", "decay", "blend", "belady")
BUDGETS = ("12.5%", "25%", "37.5%", "50%")
SPLITS = 5
SHARE = 0.25  # of the experts that a fixed set holds
WANTED_POINTS, WANTED_DOMAINS = 15.0, 11

Floats = npt.NDArray[np.float64]
Traces = dict[str, Trace]


def main() -> None:
    """Compute everything, write the numbers, draw the plots."""
    traces = {name: reference.trace(name) for name in reference.DOMAINS}
    cosines, per_request = cosine_matrix(traces)
    result = {
        "result": "reference_model",
        "command": "python recipes/reference/evidence.py",
        "date": datetime.now(UTC).date().isoformat(),
        "model": model_sizes(),
        "training": training(),
        "loss": losses(),
        "traces": {name: sizes_of(reference.trace(name)) for name in reference.workloads()},
        "cosine": cosine_summary(cosines, per_request),
        "entropy": entropies(traces),
        "repeat_rate": repeat_rates(traces),
        "look_ahead": look_ahead(traces),
        "hit_rates": hit_rates(traces),
        "profiles": profiles(traces),
    }
    result["criteria"] = criteria(result)
    with write_beside(RESULT) as scratch:
        scratch.write_text(compact(result) + "\n", encoding="utf-8")
    evidence_plots.draw(result, use_panels(traces), IMAGES)
    print(json.dumps(result["criteria"], indent=1))


def model_sizes() -> dict[str, int]:
    """The shape and the parameters, as the shipped files have them."""
    config = json.loads((SHIPPED / "config.json").read_text(encoding="utf-8"))
    layers, experts, top_k = config["num_hidden_layers"], config["num_local_experts"], config["num_experts_per_tok"]
    with safe_open(SHIPPED / "model.safetensors", "np") as file:
        total = sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118 - not a dict
    one = 3 * config["hidden_size"] * config["moe_intermediate_size"]
    return {
        "layers": layers,
        "experts": experts,
        "top_k": top_k,
        "hidden": config["hidden_size"],
        "expert_width": config["moe_intermediate_size"],
        "vocabulary": config["vocab_size"],
        "parameters": total,
        "expert_parameters": layers * experts * one,
        "used_per_token": total - layers * (experts - top_k) * one,
    }


def training() -> dict[str, Any]:
    """How long the model was trained."""
    found = json.loads((SHIPPED / "training.json").read_text(encoding="utf-8"))
    return {"steps": found["state"]["step"], "seconds": round(found["state"]["trained_s"]), "batch": found["batch"]} | {
        "sequence": CONTEXT,
        "tokens_seen": found["state"]["step"] * found["batch"] * CONTEXT,
    }


def losses() -> dict[str, dict[str, float]]:
    """Held-out loss per domain, and the same per byte, which does not depend on the tokenizer."""
    held_out = json.loads((SHIPPED / "training.json").read_text(encoding="utf-8"))["held_out"]
    sizes = corpus_sizes()
    found = {}
    for domain in reference.DOMAINS:
        kept = {key: sizes[domain][key] for key in ("train_tokens", "valid_tokens", "valid_bytes")}
        bits = held_out[domain] * kept["valid_tokens"] / kept["valid_bytes"] / math.log(2)
        found[domain] = {"nats_per_token": round(held_out[domain], 4), "bits_per_byte": round(bits, 4)} | kept
    return found


def corpus_sizes() -> dict[str, dict[str, int]]:
    """Tokens and bytes per domain: from the tokenizer's run, or as an earlier result states them."""
    path = WORK / "sizes.json"
    if path.exists():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return dict(json.loads(RESULT.read_text(encoding="utf-8"))["loss"])


def sizes_of(trace: Trace) -> dict[str, float]:
    """How much was recorded."""
    prefill, decode = trace.count(Phase.PREFILL), trace.count(Phase.DECODE)
    return {
        "requests": trace.requests,
        "prefill_tokens": prefill,
        "decode_tokens": decode,
        "new_tokens_repeating": _round(repeating(trace)),
    }


def repeating(trace: Trace) -> float:
    """Share of new tokens that end a run of four which their request has had before."""
    assert trace.token_ids is not None  # noqa: S101 - the shipped traces have them
    seen: set[tuple[int, ...]] = set()
    again = []
    runs = np.lib.stride_tricks.sliding_window_view(trace.token_ids, 4)
    for run, request, phase in zip(runs.tolist(), trace.request[3:].tolist(), trace.phase[3:].tolist(), strict=True):
        key = (request, *run)
        if phase == Phase.DECODE:
            again.append(key in seen)
        seen.add(key)
    return float(np.mean(again))


def counts_of(trace: Trace) -> Floats:
    """Accesses per request, layer and expert, of prompts and new tokens together."""
    shape = trace.shape
    grid = np.zeros((trace.requests, shape.layers, shape.experts))
    layers = np.arange(shape.layers)[None, :, None]
    np.add.at(grid, (trace.request[:, None, None], layers, trace.experts), 1.0)
    return grid


def use_panels(traces: Traces) -> dict[str, Floats]:
    """Share of accesses per layer and expert, seen on half of the requests and sorted by the other half.

    In each layer the experts are ordered by the domain that uses them most; a domain that did not repeat its habits
    would show no block of its own.
    """
    counts = {name: counts_of(trace) for name, trace in traces.items()}
    seen = {name: _shares(grid[1::2].sum(0)) for name, grid in counts.items()}
    other = np.stack([_shares(grid[0::2].sum(0)) for grid in counts.values()])
    favourite, most = other.argmax(0), other.max(0)
    order = np.lexsort((-most, favourite), axis=-1)
    panels = {name: np.take_along_axis(shares, order, -1) for name, shares in seen.items()}
    return panels | {"all domains": np.mean(list(panels.values()), axis=0)}


def _shares(counts: Floats) -> Floats:
    return np.asarray(counts / counts.sum(-1, keepdims=True))


def cosine_matrix(traces: Traces) -> tuple[Floats, list[tuple[int, Floats]]]:
    """Mean cosine between requests of two domains, never of a request with itself; and each request's own means."""
    vectors = []
    for trace in traces.values():
        flat = counts_of(trace).reshape(trace.requests, -1)
        vectors.append(flat / np.linalg.norm(flat, axis=1, keepdims=True))
    matrix = np.zeros((len(vectors), len(vectors)))
    per_request = []
    for i, own in enumerate(vectors):
        means = np.stack([(own @ other.T).mean(1) for other in vectors], axis=1)  # [requests, domains]
        number = len(own)
        means[:, i] = (means[:, i] * number - 1.0) / (number - 1)  # without the request itself, whose cosine is 1
        matrix[i] = means.mean(0)
        per_request += [(i, row) for row in means]
    return matrix, per_request


def cosine_summary(matrix: Floats, per_request: list[tuple[int, Floats]]) -> dict[str, Any]:
    """Within a domain against between domains."""
    names, size = reference.DOMAINS, len(matrix)
    within = np.diag(matrix)
    outside = matrix[~np.eye(size, dtype=bool)].reshape(size, size - 1)
    nearest = np.where(np.eye(size, dtype=bool), -1.0, matrix).argmax(1)
    margins = [row[i] - np.delete(row, i).mean() for i, row in per_request]
    own_first = [row.argmax() == i for i, row in per_request]
    return {
        "within_mean": _round(within.mean()),
        "between_mean": _round(outside.mean()),
        "margin": _round(within.mean() - outside.mean()),
        "margin_smallest_request": _round(min(margins)),
        "requests": len(per_request),
        "requests_nearest_to_own_domain": int(sum(own_first)),
        "domains_within_above_every_between": int((within > outside.max(1)).sum()),
        "by_domain": {
            name: {
                "within": _round(within[i]),
                "between_mean": _round(outside[i].mean()),
                "between_highest": _round(outside[i].max()),
                "nearest_other": names[nearest[i]],
                "requests_nearest_to_own": int(
                    sum(first for (j, _), first in zip(per_request, own_first, strict=True) if j == i)
                ),
            }
            for i, name in enumerate(names)
        },
        "matrix": _round(matrix),
    }


def entropies(traces: Traces) -> dict[str, Any]:
    """Entropy of use per layer, 1 when all experts are used alike; "all" weighs the domains alike."""
    shares = {name: _shares(counts_of(trace).sum(0)) for name, trace in traces.items()}
    shares["all"] = np.mean(list(shares.values()), axis=0)
    return {name: _round(_entropy(own)) for name, own in shares.items()}


def _entropy(shares: Floats) -> Floats:
    logs = np.log(np.where(shares > 0, shares, 1.0))
    return np.asarray(-(shares * logs).sum(-1) / np.log(shares.shape[-1]))


def repeat_rates(traces: Traces) -> dict[str, Any]:
    """Share of a new token's experts that an earlier new token of the request used, too.

    `unrelated` is the same for two tokens drawn at random from different requests of the domain.
    """
    shape = next(iter(traces.values())).shape
    found = {}
    for name, trace in traces.items():
        used, request = _used(trace, Phase.DECODE)
        rates = []
        for lag in LAGS:
            same = request[lag:] == request[:-lag]
            rates.append(_overlap(used[lag:][same], used[:-lag][same], shape.top_k))
        found[name] = {"by_lag": _round(rates), "unrelated": _round(_unrelated(used, request, shape.top_k))}
    means = {key: _round(np.mean([own[key] for own in found.values()], axis=0)) for key in ("by_lag", "unrelated")}
    return {"lags": list(LAGS), "chance": shape.top_k / shape.experts, "mean": means, "by_domain": found}


def _used(trace: Trace, phase: Phase) -> tuple[Floats, npt.NDArray[np.int32]]:
    """Which experts each token of a phase used, as ones; and the tokens' requests."""
    rows = trace.phase == phase
    used = np.zeros((int(rows.sum()), trace.shape.layers, trace.shape.experts))
    np.put_along_axis(used, trace.experts[rows].astype(np.int64), 1.0, -1)
    return used, trace.request[rows]


def _overlap(one: Floats, other: Floats, top_k: int) -> float:
    return float((one * other).sum(-1).mean() / top_k)


def _unrelated(used: Floats, request: npt.NDArray[np.int32], top_k: int) -> float:
    sums = np.stack([used[request == r].sum(0) for r in np.unique(request)])
    sizes = np.array([np.count_nonzero(request == r) for r in np.unique(request)])
    together = (sums.sum(0) ** 2).sum() - (sums**2).sum()
    pairs = sizes.sum() ** 2 - (sizes**2).sum()
    return float(together / pairs / used.shape[1] / top_k)


def look_ahead(traces: Traces) -> dict[str, Any]:
    """Share of the true experts among those predicted some layers earlier, over the tokens of all domains."""
    found: dict[str, Any] = {}
    for phase in (Phase.DECODE, Phase.PREFILL):
        recalls = {name: _recall(trace, phase) for name, trace in traces.items()}
        pooled = np.concatenate(list(recalls.values()))  # [tokens, layers, distances]
        by_layer = pooled.mean(0).T  # [distances, layers], not a number where no prediction can be made
        found[phase.name.lower()] = {
            "by_distance": _round(np.nanmean(by_layer, axis=1)),
            "by_distance_and_layer": [[None if math.isnan(x) else _round(x) for x in row] for row in by_layer],
            "by_domain": {name: _round(np.nanmean(own.mean(0), axis=0)) for name, own in recalls.items()},
        }
    found["most_used"] = _most_used(traces)
    return found


def _recall(trace: Trace, phase: Phase) -> Floats:
    assert trace.predictions is not None  # noqa: S101 - the shipped traces have them
    rows = trace.phase == phase
    predictions, experts = trace.predictions[rows], trace.experts[rows]
    right = (predictions[..., :, None] == experts[:, :, None, None, :]).any(-2).mean(-1)
    return np.where((predictions >= 0).any(-1), right, np.nan)


def _most_used(traces: Traces) -> dict[str, float]:
    """The same share when the prediction is always the domain's most used experts of the layer, as counted here."""
    found = {}
    for phase in (Phase.DECODE, Phase.PREFILL):
        rates = []
        for trace in traces.values():
            means = np.sort(_used(trace, phase)[0].mean(0), axis=-1)[:, -trace.shape.top_k :]
            rates.append(means.sum(-1).mean() / trace.shape.top_k)
        found[phase.name.lower()] = _round(np.mean(rates))
    return found


def hit_rates(traces: Traces) -> dict[str, Any]:
    """Decode hit rates from a cold start, slots per layer."""
    rows = simulate(traces, Sweep(policies=POLICIES, budgets=BUDGETS, fit=0.0)).rows
    found: dict[str, Any] = {name: {policy: [] for policy in POLICIES} for name in traces}
    for row in rows:
        if row.phase == "decode" and row.start == "cold":
            found[row.trace][row.policy].append(_round(row.hit_rate))
    means = {policy: _round(np.mean([own[policy] for own in found.values()], axis=0)) for policy in POLICIES}
    return {"budgets_percent": [float(b.rstrip("%")) for b in BUDGETS], "by_domain": found, "mean": means}


def profiles(traces: Traces) -> dict[str, Any]:
    """A fixed set from the domain's own requests against one from all other domains, on requests not counted."""
    totals = {name: counts_of(trace).sum(0) for name, trace in traces.items()}
    found = {}
    for name, trace in traces.items():
        others = {other: grid for other, grid in totals.items() if other != name}
        together = np.sum(list(others.values()), axis=0)
        alike = np.sum([_shares(grid) for grid in others.values()], axis=0)  # a longer trace weighs no more
        rates = []  # [splits, sets]
        for seed in range(SPLITS):
            fit, judged = trace.split(0.5, seed)
            sets = [counts_of(fit).sum(0), together, alike, *others.values()]
            rates.append([fixed_set(counts, judged) for counts in sets])
        own, other, even, *single = np.mean(rates, axis=0)
        differences = [100 * (row[0] - row[1]) for row in rates]
        found[name] = {
            "own": _round(own),
            "other": _round(other),
            "points": _round(100 * (own - other), 2),
            "points_lowest_split": _round(min(differences), 2),
            "other_with_domains_weighed_alike": _round(even),
            "best_single_other": _round(max(single)),
            "best_single_other_name": list(others)[int(np.argmax(single))],
        }
    means = {
        key: _round(np.mean([own[key] for own in found.values()])) for key in ("own", "other", "best_single_other")
    }
    return {"share_of_experts": SHARE, "splits": SPLITS, "mean": means, "by_domain": found}


def fixed_set(counts: Floats, judged: Trace) -> float:
    """Decode hit rate of the most counted experts, kept for good."""
    shape = judged.shape
    controller = Controller(SlotPlan(shape, round(SHARE * shape.total_experts)), parse("static"))
    controller.state.counts[...] = counts
    controller.preload(counts)
    return controller.replay(judged.events()).counters.hit_rate(Phase.DECODE)


def criteria(result: dict[str, Any]) -> dict[str, Any]:
    """Whether the model does what it is for."""
    cosine, points = result["cosine"], [own["points"] for own in result["profiles"]["by_domain"].values()]
    reached = sum(p >= WANTED_POINTS for p in points)
    return {
        "cosine": {
            "within_mean": cosine["within_mean"],
            "between_mean": cosine["between_mean"],
            "domains_within_above_every_between": cosine["domains_within_above_every_between"],
            "wanted_domains": len(reference.DOMAINS),
            "met": cosine["domains_within_above_every_between"] == len(reference.DOMAINS),
        },
        "own_profile": {
            "wanted_points": WANTED_POINTS,
            "wanted_domains": WANTED_DOMAINS,
            "domains_reached": reached,
            "points_mean": _round(np.mean(points), 2),
            "met": reached >= WANTED_DOMAINS,
        },
    }


def compact(result: dict[str, Any]) -> str:
    """JSON with one line per innermost list."""
    return re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), json.dumps(result, indent=1))


def _round(value: Any, digits: int = 4) -> Any:
    return np.round(np.asarray(value, float), digits).tolist()


if __name__ == "__main__":
    main()
