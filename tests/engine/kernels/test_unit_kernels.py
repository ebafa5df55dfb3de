"""Packed experts by units: PTX to the bits of the decoders, whole experts, and the same bits in all phases.

Without a GPU the interpreter runs the kernels, and numpy their PTX.
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton")
import expert_samples as samples  # noqa: E402
import ptx  # noqa: E402
import tiny_device  # noqa: E402
from packed_samples import encoded_sample, random_parts  # noqa: E402
from tiny_device import DEVICE  # noqa: E402

from hotset import formats  # noqa: E402
from hotset.engine.kernels import triton_experts, tuning  # noqa: E402
from hotset.engine.kernels.activations import _PLAIN, Activation  # noqa: E402
from hotset.engine.kernels.spec import ExpertSpec  # noqa: E402
from hotset.engine.kernels.triton_experts import Phase, TritonExperts  # noqa: E402
from hotset.engine.kernels.tuning import Choice, Problem  # noqa: E402
from hotset.engine.kernels.unit_products import UnitProducts  # noqa: E402
from hotset.formats._gguf_ptx import product_of_blocks  # noqa: E402
from hotset.formats._ptx import BYTES, NIBBLES  # noqa: E402
from hotset.formats._unit_ptx import assembled  # noqa: E402
from hotset.store import Part, SlotLayout  # noqa: E402

pytestmark = [
    pytest.mark.skipif(tiny_device.LATE, reason="the interpreter came too late"),
    pytest.mark.filterwarnings("ignore"),
]
SPECS = [
    "mxfp4", "fp8:block_n=16,block_k=32", "fp8:block_n=0,block_k=0,scales=bfloat16",
    "fp8:block_n=1,block_k=32,scales=e8m0", "fp8:block_n=16,block_k=32,values=e5m2,scales=float16", "nvfp4:matrices=2",
    "nvfp4:matrices=2,divides=on", "integer:scales=float32", "integer:bits=8,scales=float32",
    "integer:bits=8,group=0,scales=float32", "integer:group=32,zeros=bytes,scales=float32",
    "integer:bits=8,group=16,zeros=bytes,scales=float32", "gguf:kind=Q4_0", "gguf:kind=Q8_0", "gguf:kind=Q4_K",
    "gguf:kind=Q6_K",
]  # fmt: skip
ROWS = 4 if CUDA else 32  # the interpreter is slow to start a program, and a compiler to unroll many rows
CHOICES = [
    (Choice(ROWS, 8, 1, 1, 1), Choice(ROWS, 8, 1, 1, 1)),
    (Choice(2, 32, 1, 1, 2), Choice(4, 16, 1, 1, 2)),
]


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA:
        ptx.patch(monkeypatch)
        monkeypatch.setattr(triton_experts, "capability_of", lambda _: 90)


def both(family: str, spec: str, dtype: str = "float32", **more: int) -> tuple[samples.Sample, samples.Sample]:
    """Experts of a family as plain numbers, and in a format."""
    sizes = {"hidden_size": 96, "intermediate_size": 64, "moe_intermediate_size": 64} | more
    if spec.endswith("_K"):
        sizes = {"hidden_size": 512, "intermediate_size": 256, "moe_intermediate_size": 256}
    if family == "gpt_oss":
        del sizes["moe_intermediate_size"]
    dense = samples.sample_of(*samples.spec_of(family, **sizes), getattr(torch, dtype))
    return dense, encoded_sample(dense, formats.parse(spec + ("," if ":" in spec else ":") + f"dtype={dtype}"))


def kernels_of(sample: samples.Sample, choices: Any = CHOICES[0], **options: Any) -> TritonExperts:
    kernels = TritonExperts(sample.arena, sample.layout, sample.spec, top_k=3, choices=choices, **options)
    assert isinstance(kernels.products, UnitProducts)
    for tensor in (kernels.scratch.hidden, kernels.scratch.raw, kernels.scratch.ordered):
        assert tensor is not None
        tensor.fill_(math.nan)
    return kernels


@pytest.mark.parametrize(
    ("family", "spec", "choices"),
    [
        *(("qwen3_moe", spec, CHOICES[0]) for spec in SPECS),
        ("gpt_oss", "mxfp4", CHOICES[0]),
        ("qwen3_moe", "mxfp4", CHOICES[1]),
        ("qwen3_moe", "fp8:block_n=16,block_k=32", CHOICES[1]),
    ],
)
def test_experts_are_computed_by_units(family: str, spec: str, choices: Any) -> None:
    dense, packed = both(family, spec)
    routing = samples.routing_of(packed, tokens=1, top_k=3)
    out = torch.full_like(routing.x, math.nan)
    kernels_of(packed, choices)(routing.x, routing.rows(packed), None, routing.weights, out)
    expected = samples.expected(dense, routing)
    assert expected.abs().max() > 1e-3
    assert (out - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("spec", "dtype"), [("mxfp4", "float32"), ("integer", "bfloat16"), ("fp8:block_n=16,block_k=32", "bfloat16")]
)
def test_phases_and_parts_give_the_same_bits(spec: str, dtype: str) -> None:
    packed = both("qwen3_moe", spec, dtype, hidden_size=32)[1]
    routing = samples.routing_of(packed, tokens=2, top_k=3, sentinels=2)
    rows, kernels = routing.rows(packed), kernels_of(packed)
    whole = torch.full_like(routing.x, math.nan)
    kernels(routing.x, rows, None, routing.weights, whole)
    arriving = [row for row in rows[3:].tolist() if row >= 0 and row not in rows[:3].tolist()][:2]
    late = torch.isin(rows, torch.tensor(arriving, device=DEVICE)).to(torch.int8)  # nothing of the first token
    assert late.any()
    memory = packed.arena.memory.view(packed.arena.slots, -1)
    there, out = memory.clone(), torch.full_like(whole, math.nan)
    memory[rows[(late != 0) & (rows >= 0)].long()] = 0xFF  # not yet there
    kernels(routing.x, rows, late, routing.weights, out, Phase.EARLY)
    assert torch.equal(out[0], whole[0])
    memory.copy_(there)
    kernels(routing.x, rows, late, routing.weights, out, Phase.LATE)
    assert torch.equal(out, whole)
    kernels, out = kernels_of(packed), torch.full_like(whole, math.nan)
    kernels(routing.x, torch.where(late == 0, rows, -1), None, routing.weights, out, Phase.KEEP)
    kernels(
        routing.x, torch.where(rows >= 0, torch.where(late != 0, rows, 0), -1), late, routing.weights, out, Phase.LAST
    )
    assert torch.equal(out, whole)


@pytest.mark.parametrize(("spec", "dtype"), [("integer", "bfloat16"), ("integer:scales=float16", "float16")])
def test_narrow_types_are_near_the_plain_numbers(spec: str, dtype: str) -> None:
    dense, packed = both("qwen3_moe", spec, dtype)
    routing = samples.routing_of(packed, tokens=2, top_k=3)
    out = torch.full_like(routing.x, math.nan)
    kernels_of(packed)(routing.x, routing.rows(packed), None, routing.weights, out)
    expected = samples.expected(dense, routing).float()
    assert (out.float() - expected).abs().max() <= (0.02 if dtype == "bfloat16" else 0.003) * expected.abs().max()


def test_experts_without_a_gate_are_computed_by_units() -> None:
    activation = Activation(*_PLAIN[0], False, False, 1.0, 0.0)
    spec = ExpertSpec("up", "down", activation)
    layout = SlotLayout.of([Part("up", (64, 96), "float32"), Part("down", (96, 64), "float32")])
    dense = samples.sample_of(spec, {part.name: part.shape for part in layout.parts}, torch.float32)
    packed = encoded_sample(dense, formats.parse("mxfp4:dtype=float32"))
    routing = samples.routing_of(packed, tokens=1, top_k=3)
    out = torch.full_like(routing.x, math.nan)
    kernels_of(packed)(routing.x, routing.rows(packed), None, routing.weights, out)
    expected = samples.expected(dense, routing)
    assert (out - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize(
    "spec", ["integer", "integer:scales=bfloat16,dtype=float16", "integer:ordered=2,scales=float32"]
)
def test_what_units_would_round_otherwise_goes_by_tiles(spec: str) -> None:
    words = spec if "dtype" in spec else spec + ("," if ":" in spec else ":") + "dtype=float32"
    tile = formats.parse(words).tile()
    assert tile is not None
    assert tile.units is None


CODES = {
    "fp4": ("mxfp4", 32), "int4": ("integer:group=0,scales=float32", 32),
    "int8": ("integer:bits=8,group=0,scales=float32", 16), "e4m3": ("fp8:block_n=0,block_k=0", 16),
    "e5m2": ("fp8:block_n=0,block_k=0,values=e5m2", 16),
}  # fmt: skip


@pytest.mark.skipif(CUDA, reason="is of the emulation")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("codes", CODES)
def test_every_code_and_every_exponent_is_decoded_to_its_bits(codes: str, capability: int) -> None:
    """A unit times an input of a single one is a weight: all of them, in every place of a unit."""
    import numpy as np

    spec, inputs = CODES[codes]
    chosen = formats.parse(spec + ("," if ":" in spec else ":") + "dtype=float32")
    scale, kind = ("e8m0", np.uint8) if codes == "fp4" else ("float32", np.float32)
    assembly = assembled(codes, scale, False, capability)
    rows = 256
    data = random_parts(chosen, rows, inputs, 1, wild=True)[0].cpu().numpy()
    data[:, 0] = np.arange(256)  # every code
    exponents = np.arange(256, dtype=np.uint8)[:, None]
    scales = exponents if codes == "fp4" else np.full((1, 1), 0.75, np.float32)
    expected = torch.empty((rows, inputs))
    chosen.decode([torch.from_numpy(data), torch.from_numpy(scales)], expected)
    words = np.ascontiguousarray(data).view(np.uint32)
    loaded = np.broadcast_to(scales.astype(kind), (rows, 1))[:, 0]
    loaded = loaded.astype(np.uint32) if codes == "fp4" else np.ascontiguousarray(loaded).view(np.uint32)
    for number in range(inputs):
        place = number
        if assembly.order == NIBBLES:
            place = number // 8 * 8 + number % 4 * 2 + number // 4 % 2
        elif assembly.order == BYTES:
            place = number // 4 * 4 + number % 2 * 2 + number // 2 % 2
        given = [np.full(rows, float(at == place), np.float32) for at in range(inputs)]
        columns = [np.ascontiguousarray(words[:, word]) for word in range(4)]
        (found,) = ptx.run(assembly.multiply, assembly.constraints.split(","), [*columns, *given, loaded])
        rest = np.isfinite(expected.numpy()).all(axis=1)  # one that is no number takes its whole unit with it
        assert np.isnan(found[np.isnan(expected.numpy()).any(axis=1)]).all()
        assert (found[rest] == expected.numpy()[rest, number]).all()


ROUNDED = [
    ("integer", "bfloat16"), ("integer:zeros=bytes", "bfloat16"), ("integer:scales=float16", "bfloat16"),
    ("integer:scales=float16", "float16"), ("integer:scales=float32", "bfloat16"),
    ("integer:bits=8,group=16", "bfloat16"), ("integer:bits=8,group=16,zeros=bytes", "bfloat16"),
    ("integer:bits=8,group=16,scales=float16,zeros=bytes", "float16"),
    ("fp8:block_n=1,block_k=16", "bfloat16"), ("fp8:block_n=1,block_k=16", "float16"),
    ("fp8:block_n=1,block_k=16,scales=bfloat16,values=e5m2", "bfloat16"), ("nvfp4", "bfloat16"),
    ("nvfp4:divides=on", "bfloat16"), ("nvfp4", "float16"),
]  # fmt: skip


@pytest.mark.skipif(CUDA, reason="is of the emulation")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("spec", "dtype"), ROUNDED)
def test_weights_are_rounded_to_the_type_computed_in(spec: str, dtype: str, capability: int) -> None:
    """A unit times an input of a single one is a weight, to the bits of the decoder."""
    import numpy as np

    chosen = formats.parse(spec + ("," if ":" in spec else ":") + f"dtype={dtype}")
    units = chosen.tile().units  # type: ignore[union-attr]
    assert units is not None
    assembly, rows, inputs = units.assemble(capability), 64, units.inputs
    parts = random_parts(chosen, rows, inputs, 1, wild=False)
    expected = torch.empty((rows, inputs), dtype=getattr(torch, dtype))
    chosen.decode(parts, expected)
    assert len(expected.unique()) > rows
    words = np.ascontiguousarray(parts[0].numpy()).view(np.uint32)
    scales = np.ascontiguousarray(parts[1].view(torch.uint8).numpy()).view(f"u{units.scale_bytes}")[:, 0]
    beside = [scales.astype(np.uint32)]
    if units.zeros:
        beside.append(parts[2][:, 0].numpy().astype(np.uint32))
    elif units.whole:
        beside.append(np.broadcast_to(parts[2].numpy().view(np.uint32), (rows,)))
    for number in range(inputs):
        place = number
        if assembly.order == NIBBLES:
            place = number // 8 * 8 + number % 4 * 2 + number // 4 % 2
        elif assembly.order == BYTES:
            place = number // 4 * 4 + number % 2 * 2 + number // 2 % 2
        given = [np.full(rows, float(at == place), np.float32) for at in range(inputs)]
        columns = [np.ascontiguousarray(words[:, word]) for word in range(4)]
        (found,) = ptx.run(assembly.multiply, assembly.constraints.split(","), [*columns, *given, *beside])
        assert (found == expected[:, number].float().numpy()).all()


@pytest.mark.skipif(CUDA, reason="is of the emulation")
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_weights_of_blocks_are_rounded(kind: str) -> None:
    """A unit times an input of a single one, rounded: what float32 gives has been compared with decoders."""
    import numpy as np

    rng, rows = np.random.default_rng(0), 64
    units = {each: product_of_blocks(kind, each) for each in ("float32", "bfloat16", "float16")}
    inputs = units["float32"].inputs  # type: ignore[union-attr]
    words = list(rng.integers(0, 1 << 32, (4, rows), dtype=np.uint64).astype(np.uint32))
    factors = list((rng.random((4, rows)) * 1e-3).astype(np.float32))
    halves = [factors[0].astype(np.float16).view(np.uint16).astype(np.uint32)]
    beside = {"Q4_K": factors, "Q6_K": [*reversed(words), *factors[:2]]}.get(kind, halves)
    for place in range(inputs):
        given = [np.full(rows, float(at == place), np.float32) for at in range(inputs)]
        found = {}
        for name, product in units.items():
            assembly = product.assemble(90)  # type: ignore[union-attr]
            (out,) = ptx.run(assembly.multiply, assembly.constraints.split(","), [*words, *given, *beside])
            found[name] = torch.from_numpy(np.array(out))
        assert torch.equal(found["float32"].bfloat16().float(), found["bfloat16"])
        assert torch.equal(found["float32"].half().float(), found["float16"])


def test_choices_of_units_fit_every_row() -> None:
    for units, group in ((1, 1), (2, 2), (24, 8), (64, 8), (90, 4), (448, 8)):
        for kernel in ("up units", "down units"):
            problem = Problem(kernel, 64, units, "mxfp4", False, True, group, 1)
            for choice in tuning.candidates(problem):
                chunks = -(-units // choice.block_k)
                assert choice.unroll <= tuning.UNIT_ROUNDS
                assert -(-chunks // choice.unroll) * choice.unroll < chunks + choice.unroll
                beside = group if kernel == "down units" else choice.block_n
                assert choice.warps == 1 or choice.warps * 32 <= beside * choice.block_k
