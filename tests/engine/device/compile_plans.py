"""Compiles the kernels that plan events, under every policy and `late`, for GPUs that need not be there.

``python tests/engine/device/compile_plans.py [--some] 80 90`` prints the size of each kernel.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from hotset.cache.controller import Controller
from hotset.cache.plan import SlotPlan
from hotset.engine import support
from hotset.engine.device.plan import Plan, plan_event
from hotset.engine.device.policies.nextuse import Following, follow_event
from hotset.engine.device.table import DeviceTable
from hotset.policies import Admit, parse
from hotset.shape import ModelShape

POINTERS = {
    torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1",
    torch.uint8: "*u8", torch.float32: "*fp32", torch.float64: "*fp64",
}  # fmt: skip
PLANS = ("blend", "lru:admit=late", "nextuse")
SHAPES = {"32 experts": (ModelShape(24, 32, 4), 1), "128 experts": (ModelShape(48, 128, 8), 8)}


def types_of(tensors: Any) -> Any:
    """The types of a named tuple of tensors, or of one."""
    if isinstance(tensors, torch.Tensor):
        return POINTERS[tensors.dtype]
    return type(tensors)(*(POINTERS[tensor.dtype] for tensor in tensors))


def plan_of(spec: str, shape: ModelShape, tokens: int) -> Plan:
    """What plans events of so many tokens."""
    staging = min(tokens * shape.top_k, shape.experts)
    host = Controller(SlotPlan(shape, 8 * shape.layers, staging=staging), parse(spec))
    table, rows = DeviceTable.upload(host, "cpu"), torch.zeros(8 * shape.layers, dtype=torch.int32)
    return Plan(
        host,
        table,
        tokens * shape.top_k,
        rows,
        0,
        staging=rows[:staging] if host.policy.admission is Admit.LATE else None,
    )


def compiled(kernel: Any, constants: dict[str, Any], types: dict[str, Any], warps: int, capability: int) -> Any:
    """A kernel as a program for a GPU of this kind."""
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": warps, "enable_fp_fusion": False}
    return compile_kernel(ASTSource(kernel, signature, values, {}), target=target, options=options)


def compiled_plan(plan: Plan, capability: int) -> Any:
    """The kernel that plans."""
    listed = {"staging": None} if plan.staging is None else {}
    types = {
        "index": "*i64", "layer": "i32", "table": types_of(plan.table.table), "state": types_of(plan._state),
        "out": types_of(plan.out), "row_of": "*i32", "staging_row": "i32", "stop": "*i64", "staging": "*i32",
    }  # fmt: skip
    return compiled(plan_event, plan._constants | listed, types, plan.num_warps, capability)


def compiled_follower(plan: Plan, capability: int) -> Any:
    """The kernel before it."""
    follow = plan._follow
    assert isinstance(follow, Following)
    types = {
        "index": "*i64", "requests": "*i64", "layer": "i32", "table": types_of(plan.table.table),
        "state": types_of(plan._state),
    }  # fmt: skip
    return compiled(follow_event, follow._constants, types, follow._warps, capability)


def main(capabilities: list[int], *, some: bool = False) -> None:
    """Compile all; a kernel that cannot be compiled raises."""
    support.LATE_HAS_RUN = True
    for capability in capabilities:
        for name, (shape, tokens) in list(SHAPES.items())[: 1 if some else None]:
            for spec in ("nextuse",) if some else PLANS:
                plan = plan_of(spec, shape, tokens)
                made = [compiled_plan(plan, capability)]
                made += [compiled_follower(plan, capability)] if spec == "nextuse" else []
                for one in made:
                    lines = len(re.findall(r"\n\s+[a-z@]", one.asm["ptx"]))
                    barriers = one.asm["ptx"].count("bar.sync")
                    print(
                        capability,
                        spec,
                        name,
                        one.metadata.name,
                        lines,
                        "instructions",
                        barriers,
                        "barriers",
                        flush=True,
                    )


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--some"]
    main([int(word) for word in words] or [80, 89, 90], some="--some" in sys.argv)
