"""The two products of an expert by units: for packed matrices on devices that run PTX."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import triton

from hotset.engine.kernels.launches import kind_of
from hotset.engine.kernels.pairs import Pairs, Phase, Scratch
from hotset.engine.kernels.tile_products import ROUTER_DTYPES, Products, TiledLinear
from hotset.engine.kernels.tuning import Choice, Problem
from hotset.engine.kernels.unit_kernels import down_units_kernel, order_kernel, up_units_kernel
from hotset.formats.base import UnitAssembly, UnitProduct

Tensor = torch.Tensor

MAX_LANES, MAX_UNROLL = 32, 4
"""Units that one round of a program loads of a row: what the input is padded to is at most a multiple of both."""
ORDER_BLOCK = 1024


@dataclass(frozen=True, eq=False)
class UnitLinear:
    """One linear map whose rows are whole units."""

    tiled: TiledLinear
    units: UnitProduct
    capability: int

    @classmethod
    def of(cls, tiled: TiledLinear, capability: int) -> UnitLinear | None:
        """The linear map by units, where its format and its depth allow it."""
        units = tiled.tile.units
        fits = capability and units is not None and units.serves(tiled.linear.depth)
        return cls(tiled, units, capability) if fits and units is not None else None

    @cached_property
    def assembly(self) -> UnitAssembly:
        """The PTX for the device."""
        return self.units.assemble(self.capability)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """What the kernels have to know of the parts."""
        return self.units.shape(self.tiled.linear.width)

    @property
    def count(self) -> int:
        """The units of a row."""
        return self.tiled.linear.depth // self.units.inputs

    @property
    def room(self) -> int:
        """The inputs that any choice pads a row to, at most."""
        step = MAX_LANES * MAX_UNROLL
        return -(-self.count // step) * step * self.units.inputs

    def padded(self, choice: Choice) -> int:
        """The inputs of a row and the zeros behind them."""
        step = choice.block_k * choice.unroll
        return -(-self.count // step) * step * self.units.inputs


class UnitProducts(Products):
    """The two products by units; a choice's blocks are rows, and threads side by side along a row.

    Programs are many and short, so that those of the late phase cost time even where nothing is late: that is timed.
    """

    timed_phases: ClassVar[tuple[Phase, ...]] = (Phase.EARLY, Phase.LATE)

    def __init__(self, up: UnitLinear, down: UnitLinear, activation: Any, top_k: int) -> None:
        super().__init__(up.tiled, down.tiled, activation, top_k)
        self.up_units, self.down_units = up, down

    def scratch(self, pairs: int, device: torch.device) -> Scratch:
        """Room for so many pairs."""
        late = torch.zeros(pairs, dtype=torch.int8, device=device)
        return self.room(pairs, torch.zeros((pairs, self.width), dtype=self.dtype, device=device), late)

    def room(self, pairs: int, raw: Tensor, late: Tensor) -> Scratch:
        """Room for so many pairs, with results and lateness in the memory given."""
        hidden = torch.empty((pairs, self.down_units.room), dtype=torch.float32, device=raw.device)
        return Scratch(hidden, raw, late, hidden.new_empty((-(-pairs // self.top_k), self.up_units.room)))

    def multiply_up(self, x: Tensor, pairs: Pairs, choices: tuple[Choice, Choice], scratch: Scratch) -> None:
        """From the input to what lies between the products; late pairs find the input in order."""
        linear, units, after, activation = self.up, self.up_units, self.down_units, self.activation
        (choice, second), stamp, ordered = choices, pairs.stamp, scratch.ordered
        assert ordered is not None  # noqa: S101 - the scratch is one of ours
        padded = units.padded(choice)
        if pairs.phase is not Phase.LATE:
            order = self._launch("order", choice._replace(warps=4), order_kernel)
            order(
                (len(x), triton.cdiv(padded, ORDER_BLOCK)), kind_of(x, ordered), x, ordered, x.shape[1], padded,
                units.units.inputs, units.assembly.order, choice.block_k, ORDER_BLOCK,
            )  # fmt: skip
        late, hidden = scratch.late if pairs.late is None else pairs.late, scratch.hidden
        bias = hidden if linear.biases is None else linear.biases
        launch = self._launch("up", choice, up_units_kernel)
        launch(
            (len(x) * self.top_k, triton.cdiv(self.inner, choice.block_n)),
            (stamp is not None, second, *kind_of(ordered, hidden)),
            ordered, linear.parts, bias, hidden, pairs.row, late, int(pairs.phase), late if stamp is None else stamp,
            linear.strides, bias.stride(0), self.inner, self.up.linear.depth, self.top_k, activation.function,
            activation.alpha, activation.limit, activation.gated, activation.interleaved, ROUTER_DTYPES[self.dtype],
            linear.biases is not None, stamp is not None, padded, after.padded(second), after.units.inputs,
            after.assembly.order, second.block_k, units.shape, units.assembly.multiply, units.assembly.constraints,
            choice.block_n, choice.block_k, choice.unroll,
        )  # fmt: skip

    def multiply_down(
        self, pairs: Pairs, weights: Tensor, out: Tensor, choices: tuple[Choice, Choice], scratch: Scratch
    ) -> None:
        """From there to the weighted sum."""
        linear, units, choice, stamp = self.down, self.down_units, choices[1], pairs.stamp
        late, hidden = scratch.late if pairs.late is None else pairs.late, scratch.hidden
        bias = hidden if linear.biases is None else linear.biases
        launch = self._launch("down", choice, down_units_kernel)
        launch(
            (len(out), triton.cdiv(self.width, choice.block_n)),
            (stamp is not None, weights.dtype, *kind_of(hidden, scratch.raw, out)),
            hidden, linear.parts, bias, weights, scratch.raw, out, pairs.row, late, int(pairs.phase),
            late if stamp is None else stamp, linear.strides, bias.stride(0), self.width, self.inner, self.top_k,
            linear.biases is not None, stamp is not None, self.summed(weights), self.group,
            triton.next_power_of_2(self.top_k), units.padded(choice), units.shape, units.assembly.multiply,
            units.assembly.constraints, choice.block_n, choice.block_k, choice.unroll,
        )  # fmt: skip

    def problems(self, tokens: int) -> tuple[Problem, Problem]:
        """What the two kernels have to do; the depth is counted in units."""
        up, down = self.up_units, self.down_units
        gated, pairs = self.activation.gated, tokens * self.top_k
        return (
            Problem("up units", self.inner, up.count, self.up.words, False, gated, 1, pairs),
            Problem("down units", self.width, down.count, self.down.words, False, False, self.group, tokens),
        )


def capability_of(device: torch.device) -> int:
    """The compute capability of a device that runs PTX, such as 90; 0 for any other."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor if major >= 8 else 0
