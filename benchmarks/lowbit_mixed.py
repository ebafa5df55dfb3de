"""Whether bits that differ by how much a workload uses an expert beat equal bits of the same size, on that workload.

Simulated: experts are replaced by what integers of 2 to 8 bits in groups of 32 decode to, in float32. For each domain
the bits are chosen by other text of the same domain, by one of: use x squared error of the weights (what a profile
knows), the measured error of the layer's output (router weights and inputs included), and that by layer instead of by
expert. They are then compared on held-out text of the domain, and on that of the other domains.
"""

from __future__ import annotations

import argparse
import os
from typing import Any, NamedTuple

import torch

from hotset.formats import _search
from hotset.formats._numbers import grouped
from hotset.models.windows import Window, batch_of

from common import machine, publish
from lowbit_quality import MATRICES, Bench, texts

Tensor = torch.Tensor
GROUP = 32
SCALE_BITS = 16 / GROUP
BITS = (2, 3, 4, 5, 6, 8)
SETS = {
    4.5: {"3, 4 and 8 bits": (3, 4, 8), "2 to 8 bits": BITS},
    5.5: {"4 and 8 bits": (4, 8), "2 to 8 bits": BITS},
}
"""What may be mixed to come to so many bits for each weight; of these hotset has 4 and 8."""
DOMAINS = ("it", "python", "en_prose", "metamath")


class Costs(NamedTuple):
    """What each choice of bits costs on a workload: [layers, experts, bits]."""

    by_use: Tensor
    by_output: Tensor


def encoded(matrices: Tensor, bits: int) -> Tensor:
    """What matrices [experts, outputs, inputs] decode to."""
    codes, scales = _search.integer_groups(grouped(matrices, matrices.shape[-1] // GROUP), bits, "bfloat16")
    return ((codes.float() - (1 << (bits - 1))) * scales.float()[..., None]).flatten(-2)


class Mixed:
    """The reference model with any bits for any expert."""

    def __init__(self, bench: Bench) -> None:
        for bits in BITS:
            _search.STEPS.setdefault(bits, _search.STEPS[4])
        self.bench = bench
        self.made = {b: [{n: encoded(layer[n], b) for n in MATRICES} for layer in bench.original] for b in BITS}

    def put(self, bits: Tensor) -> None:
        """Give each expert [layers, experts] its bits."""
        self.bench.replace(lambda layer, name, e, _: self.made[int(bits[layer, e])][layer][name][e])

    @torch.no_grad()
    def costs(self, windows: list[Window]) -> Costs:
        """Run a workload on the original, and compare each expert's output with that of all its codes."""
        layers = self.bench.layers
        shape = (len(layers), layers[0].num_experts, len(BITS))
        output, use = torch.zeros(shape), torch.zeros(shape[:2])
        for number, layer in enumerate(layers):
            original = self.bench.original[number]

            def observe(hidden: Tensor, index: Tensor, weights: Tensor, n: int = number, own: Any = original) -> Tensor:
                out = torch.zeros_like(hidden)
                for e in index.unique().tolist():
                    tokens, place = (index == e).nonzero(as_tuple=True)
                    x, w = hidden[tokens], weights[tokens, place, None]
                    y = self._expert(own, e, x)
                    use[n, e] += len(tokens)
                    for i, b in enumerate(BITS):
                        output[n, e, i] += (w * (y - self._expert(self.made[b][n], e, x))).square().sum()
                    out.index_add_(0, tokens, w * y)
                return out

            layer.forward = observe
        self.bench.replace(lambda *given: given[-1])
        self.bench.model(input_ids=batch_of(windows, torch.device("cpu")), use_cache=False)
        for layer in layers:
            del layer.__dict__["forward"]
        return Costs(use[..., None] / use.sum() * self._weight_errors(), output)

    def _expert(self, matrices: Any, expert: int, x: Tensor) -> Tensor:
        up, down = (matrices[name][expert] for name in MATRICES)
        found: Tensor = self.bench.layers[0]._apply_gate(x @ up.T) @ down.T
        return found

    def _weight_errors(self) -> Tensor:
        rows = []
        for number, original in enumerate(self.bench.original):
            errors = [sum((self.made[b][number][n] - original[n]).square().sum((1, 2)) for n in MATRICES) for b in BITS]
            rows.append(torch.stack(errors, dim=-1))
        return torch.stack(rows)


def chosen(costs: Tensor, allowed: tuple[int, ...], target: float) -> Tensor:
    """The bits of each row of costs [rows, bits] whose mean size is at most the target, and whose cost is least."""
    sizes, columns = torch.tensor(allowed) + SCALE_BITS, costs[:, [BITS.index(b) for b in allowed]]
    low, high = 1e-20, 1e20
    for _ in range(200):
        price = (low * high) ** 0.5
        if sizes[(columns + price * sizes).argmin(1)].mean() > target:
            low = price
        else:
            high = price
    return torch.tensor(allowed)[(columns + high * sizes).argmin(1)]


def plans(costs: Costs) -> dict[str, tuple[float, Tensor]]:
    """All choices of bits to be compared, by name, with the size they are to have."""
    layers, experts, _ = costs.by_use.shape
    found = {}
    for target, sets in SETS.items():
        found[f"{target}: equal, {target - SCALE_BITS:.0f} bits"] = (target, torch.full((layers, experts), int(target)))
        for name, allowed in sets.items():
            for way, cost in (("use x error", costs.by_use), ("output error", costs.by_output)):
                bits = chosen(cost.flatten(0, 1), allowed, target).view(layers, experts)
                found[f"{target}: {name} by {way}"] = (target, bits)
            by_layer = chosen(costs.by_output.sum(1), allowed, target)
            found[f"{target}: {name} by layer"] = (target, by_layer[:, None].expand(layers, experts))
    return found


def main() -> None:
    """Compare all plans in some domains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    given = texts(options.windows)
    bench = Bench({domain: given.held_out[domain] for domain in DOMAINS})
    mixed, rows = Mixed(bench), []
    for domain in DOMAINS:
        costs = mixed.costs([window for window in given.calibration.windows if window.label == domain])
        for name, (target, bits) in plans(costs).items():
            mixed.put(bits)
            found = bench.compare()
            others = [part["kl_mean"] for other, part in found["domains"].items() if other != domain]
            rows.append(
                {"workload": domain, "plan": name, "target": target, "bits": float(bits.float().mean()) + SCALE_BITS}
                | {key: value for key, value in found["domains"][domain].items() if key != "tokens"}
                | {"kl_mean_elsewhere": sum(others) / len(others)}
            )
            print(
                f"{domain:9} {name:38} {rows[-1]['bits']:.2f} bits  KL {rows[-1]['kl_mean']:.5f}  same top "
                f"{100 * rows[-1]['same_top']:.2f} %  elsewhere {rows[-1]['kl_mean_elsewhere']:.5f}",
                flush=True,
            )
    text = {"source": given.source, "windows_of_each": options.windows}
    publish("lowbit_mixed", {"machine": machine(), "text": text, "rows": rows})


if __name__ == "__main__":
    main()
