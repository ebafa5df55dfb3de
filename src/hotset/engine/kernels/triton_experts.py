"""Whole experts for few tokens in two launches, on weights where they lie in their rows.

The first kernel multiplies and gates, the second multiplies, weights and sums. A pair is one token with one of its
experts, in the router's order; the row of a pair is where its expert lies. Nothing here waits for the host
or allocates, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from itertools import product

import torch

from hotset.engine.arena import Arena
from hotset.engine.kernels.activations import Activation, activation_of
from hotset.engine.kernels.linear import RowLinear
from hotset.engine.kernels.pairs import Pairs, Phase, Scratch
from hotset.engine.kernels.spec import ExpertSpec
from hotset.engine.kernels.tile_products import ROUTER_DTYPES, Products, TiledLinear, UnsupportedExpertsError
from hotset.engine.kernels.tuning import BUCKETS, Choice, bucket, chosen, remembered
from hotset.engine.kernels.unit_products import UnitLinear, UnitProducts, capability_of
from hotset.formats import Weight, element_type, weight_of
from hotset.store import SlotLayout

__all__ = ["ROUTER_DTYPES", "Phase", "Scratch", "TritonExperts", "UnsupportedExpertsError"]

Tensor = torch.Tensor

MAX_TOKENS = 8
DTYPES = ("float32", "bfloat16", "float16")


class TritonExperts:
    """All experts of one layer, for few tokens."""

    def __init__(
        self,
        arena: Arena,
        layout: SlotLayout,
        spec: ExpertSpec,
        *,
        top_k: int,
        max_tokens: int = MAX_TOKENS,
        scratch: Scratch | None = None,
        choices: tuple[Choice, Choice] | None = None,
    ) -> None:
        activation = _activation(spec, layout)
        reason = _reason(spec, layout, activation)
        if reason is not None or activation is None:
            raise UnsupportedExpertsError(reason)
        self.up = TiledLinear.of(RowLinear(arena, layout, spec.up, spec.up_bias, spec.up_transposed))
        self.down = TiledLinear.of(RowLinear(arena, layout, spec.down, spec.down_bias, spec.down_transposed))
        self.device, self.top_k, self.max_tokens = arena.memory.device, top_k, max_tokens
        self.activation = activation
        self.products = _products(self.up, self.down, activation, top_k, capability_of(self.device))
        self.dtype, self.inner, self.width = self.up.linear.dtype, self.products.inner, self.products.width
        pairs = max_tokens * top_k
        if scratch is None or not scratch.serves(self.products.scratch(pairs, torch.device("meta"))):
            scratch = self.products.scratch(pairs, self.device)
        self.scratch = scratch
        self._choices = {} if choices is None else dict.fromkeys(BUCKETS, choices)

    @staticmethod
    def supports(spec: ExpertSpec, layout: SlotLayout) -> str | None:
        """Why these experts cannot be computed here, in words; None if they can."""
        return _reason(spec, layout, _activation(spec, layout))

    def __call__(
        self,
        x: Tensor,
        pair_row: Tensor,
        pair_late: Tensor | None,
        weights: Tensor,
        out: Tensor,
        phase: Phase = Phase.ALL,
        stamp: Tensor | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        """out = what the experts make of x [tokens, width], or the part of the work that belongs to a phase.

        `pair_row` [tokens * top_k] says the row of every pair or is below zero, `pair_late` which of them are late,
        `weights` [tokens, top_k] what the router gives them. The late phase expects what the early one has left.
        `stamp` (int64 [2]) is told, in nanoseconds, when the early phase ended and when the late one began. A caller
        with several events under way at once brings a scratch for each.
        """
        scratch = scratch or self.scratch
        most = len(scratch.hidden) // self.top_k
        if len(x) > most or not (x.is_contiguous() and weights.is_contiguous() and out.is_contiguous()):
            raise ValueError(f"up to {most} tokens are served, and their tensors must be contiguous")
        pairs, choices = Pairs(pair_row, pair_late, phase, stamp), self.choices(len(x))
        self.products.multiply_up(x, pairs, choices, scratch)
        self.products.multiply_down(pairs, weights, out, choices, scratch)

    def warm_up(self, tokens: int, weights_dtype: torch.dtype = torch.float32) -> None:
        """Choose and compile what serves so many tokens; before a capture, since this waits for the device."""
        trial = _Trial(self, tokens, weights_dtype)
        if bucket(tokens) not in self._choices:
            up, down = self.products.problems(bucket(tokens))
            second = chosen(down, trial.down, self.device)  # the first writes in the order of the second
            first = chosen(up, lambda choice: trial.up((choice, second)), self.device)
            self._choices[bucket(tokens)] = first, second
        self(trial.x, trial.rows[0], None, trial.weights, trial.out)

    def choices(self, tokens: int) -> tuple[Choice, Choice]:
        """How both kernels cut up the work of so many tokens."""
        found = self._choices.get(bucket(tokens))
        if found is None:  # not warmed up: what an earlier run has measured, and the same from here on
            up, down = self.products.problems(bucket(tokens))
            found = self._choices[bucket(tokens)] = remembered(up, self.device), remembered(down, self.device)
        return found


class _Trial:
    """Calls of both kernels with rows all over the arena, so that no cache holds what the next one reads."""

    def __init__(self, kernels: TritonExperts, tokens: int, weights_dtype: torch.dtype, sets: int = 16) -> None:
        random, device = torch.Generator("cpu").manual_seed(0), kernels.device
        self.kernels, rows = kernels, len(kernels.up.parts[0])
        tokens = min(bucket(tokens), kernels.max_tokens)
        shape = (sets, tokens * kernels.top_k)
        self.rows = torch.randint(rows, shape, generator=random, dtype=torch.int32, device="cpu").to(device)
        self.x = torch.zeros((tokens, kernels.width), dtype=kernels.dtype, device=device)
        self.weights = torch.zeros((tokens, kernels.top_k), dtype=weights_dtype, device=device)
        self.out = torch.empty_like(self.x)

    def up(self, choices: tuple[Choice, Choice]) -> None:
        """The first kernel, once with every set of rows."""
        for rows, phase in product(self.rows, self.kernels.products.timed_phases):
            self.kernels.products.multiply_up(self.x, Pairs(rows, None, phase), choices, self.kernels.scratch)

    def down(self, choice: Choice) -> None:
        """The second kernel, once with every set of rows."""
        for rows, phase in product(self.rows, self.kernels.products.timed_phases):
            self.kernels.products.multiply_down(
                Pairs(rows, None, phase), self.weights, self.out, (choice, choice), self.kernels.scratch
            )


def _products(up: TiledLinear, down: TiledLinear, activation: Activation, top_k: int, capability: int) -> Products:
    """By units where both matrices can, else by tiles."""
    first, second = UnitLinear.of(up, capability), UnitLinear.of(down, capability)
    if first is None or second is None:
        return Products(up, down, activation, top_k)
    return UnitProducts(first, second, activation, top_k)


def _down(spec: ExpertSpec, layout: SlotLayout) -> Weight:
    """The second matrix, which says how wide experts are inside, and how wide what they return."""
    return weight_of(layout, spec.down, transposed=spec.down_transposed)


def _activation(spec: ExpertSpec, layout: SlotLayout) -> Activation | None:
    return activation_of(spec, element_type(weight_of(layout, spec.up, transposed=spec.up_transposed).format.dtype))


def _reason(spec: ExpertSpec, layout: SlotLayout, activation: Activation | None) -> str | None:
    if spec.norm is not None:
        return "its experts end in a norm of their own"
    up, down = weight_of(layout, spec.up, transposed=spec.up_transposed), _down(spec, layout)
    biases = [layout.part(name).dtype for name in (spec.up_bias, spec.down_bias) if name is not None]
    dtypes = {up.format.dtype, down.format.dtype, *biases}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        return f"its experts are stored as {' and '.join(sorted(dtypes))}"
    without = next((weight.format.name for weight in (up, down) if weight.format.tile() is None), None)
    if without is not None:
        return f"its experts are stored as {without}, for which there is no kernel"
    if activation is None:
        return "what its experts compute between their two products is none of the known kinds"
    if up.outputs != down.inputs * (2 if activation.gated else 1):
        return f"{up.outputs} columns of its first matrix do not make {down.inputs} rows of the second"
    return None
