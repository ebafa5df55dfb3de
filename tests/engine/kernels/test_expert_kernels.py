"""Experts in two launches compute what the host-driven path computes, in every phase, from nothing but their slots."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton")


import expert_samples as samples  # noqa: E402

from hotset.engine.batch import ExpertBatch  # noqa: E402
from hotset.engine.kernels import tuning, with_triton  # noqa: E402
from hotset.engine.kernels.activations import _GATED, _PLAIN, Activation, activation_of  # noqa: E402
from hotset.engine.kernels.few_tokens import FewTokenKernels  # noqa: E402
from hotset.engine.kernels.grouped import GroupedKernels  # noqa: E402
from hotset.engine.kernels.pairs import Pairs  # noqa: E402
from hotset.engine.kernels.spec import ExpertSpec  # noqa: E402
from hotset.engine.kernels.triton_experts import Phase, TritonExperts  # noqa: E402
from hotset.engine.kernels.triton_kernels import up_kernel  # noqa: E402
from hotset.engine.kernels.tuning import Choice, Problem  # noqa: E402
from hotset.store import Part, SlotLayout  # noqa: E402

CUDA = torch.cuda.is_available()
pytestmark = [
    pytest.mark.skipif(not CUDA and isinstance(up_kernel, triton.JITFunction), reason="the interpreter came too late"),
    pytest.mark.filterwarnings("ignore"),  # the interpreter's numpy warns of infinities
]
FAMILIES = ["qwen3_moe", "olmoe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss", "glm4_moe", "nemotron_h"]
DTYPES = [torch.float32, torch.bfloat16]
WIDE = (Choice(32, 64, 4), Choice(32, 64, 4))  # few programs: the interpreter is slow to start one
NARROW = (Choice(16, 16, 4), Choice(16, 16, 4))  # several blocks both ways, the last of them not full


@pytest.fixture(autouse=True)
def _rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter round to bfloat16 as devices do: it cuts off."""
    if CUDA:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    cast = interpreter.InterpreterBuilder.cast_impl

    def rounded(self: Any, source: Any, target: Any) -> Any:
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, target)
        bits = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16).numpy()
        return interpreter.TensorHandle(bits.view(np.uint16), target.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounded)


def kernels_of(sample: samples.Sample, top_k: int, choices: Any = WIDE, **options: Any) -> TritonExperts:
    kernels = TritonExperts(sample.arena, sample.layout, sample.spec, top_k=top_k, choices=choices, **options)
    kernels.scratch.hidden.fill_(math.nan)
    kernels.scratch.raw.fill_(math.nan)
    return kernels


def compute(kernels: TritonExperts, sample: samples.Sample, routing: samples.Routing) -> Any:
    out = torch.full_like(routing.x, math.nan)
    kernels(routing.x, routing.rows(sample), None, routing.weights, out)
    return out


def assert_same(found: Any, expected: Any) -> None:
    """Equal but for the order of sums: here torch adds in another one, and on a device it may add in bfloat16."""
    assert torch.isfinite(found).all()
    loose = 4 if CUDA else 1
    unit = 2.0**-8 if found.dtype == torch.bfloat16 else 1e-6
    assert (found - expected).abs().max() <= loose * unit * expected.abs().max()
    if found.dtype == torch.bfloat16 and not CUDA:
        assert (found == expected).float().mean() > 0.97


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_compute_what_the_host_driven_path_computes(family: str, dtype: Any) -> None:
    sample = samples.sample_of(*samples.spec_of(family), dtype)
    routing = samples.routing_of(sample, tokens=3, top_k=4)
    assert_same(compute(kernels_of(sample, 4), sample, routing), samples.expected(sample, routing))


@pytest.mark.parametrize(
    ("family", "tokens", "top_k"),
    [("qwen3_moe", tokens, top_k) for tokens in (1, 3, 8) for top_k in (1, 4, 8)]
    + [("gpt_oss", 1, 8), ("gpt_oss", 3, 1), ("gpt_oss", 8, 4)],
)
def test_any_number_of_tokens_and_experts(family: str, tokens: int, top_k: int) -> None:
    sample = samples.sample_of(*samples.spec_of(family), torch.bfloat16)
    routing = samples.routing_of(sample, tokens, top_k)
    assert_same(compute(kernels_of(sample, top_k), sample, routing), samples.expected(sample, routing))


def test_more_experts_than_are_multiplied_at_once() -> None:
    sample = samples.sample_of(*samples.spec_of("qwen3_moe"), torch.bfloat16, experts=24)
    routing = samples.routing_of(sample, tokens=2, top_k=19)
    assert_same(compute(kernels_of(sample, 19), sample, routing), samples.expected(sample, routing))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("family", "shapes"),
    [
        ("qwen3_moe", {"gate_up_proj": (42, 37), "down_proj": (37, 21)}),
        (
            "gpt_oss",
            {"gate_up_proj": (37, 42), "gate_up_proj_bias": (42,), "down_proj": (21, 37), "down_proj_bias": (37,)},
        ),
        ("nemotron_h", {"up_proj": (21, 37), "down_proj": (37, 21)}),
        ("llama4", {"gate_up_proj": (37, 42), "down_proj": (21, 37)}),
    ],
)
def test_blocks_that_are_not_full(family: str, shapes: dict[str, tuple[int, ...]], dtype: Any) -> None:
    sample = samples.sample_of(samples.spec_of(family)[0], shapes, dtype)
    routing = samples.routing_of(sample, tokens=2, top_k=3)
    assert_same(compute(kernels_of(sample, 3, NARROW), sample, routing), samples.expected(sample, routing))


def test_the_default_choices_and_weights_of_the_same_type() -> None:
    sample = samples.sample_of(*samples.spec_of("mixtral"), torch.bfloat16)
    routing = samples.routing_of(sample, tokens=1, top_k=2, exact=False)
    assert_same(compute(kernels_of(sample, 2, None), sample, routing), samples.expected(sample, routing))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_of_others_count_for_nothing(family: str) -> None:
    sample = samples.sample_of(*samples.spec_of(family), torch.bfloat16)
    routing = samples.routing_of(sample, tokens=3, top_k=4, sentinels=8)
    routing.index[1] = torch.arange(sample.experts, sample.experts + 4)  # a token without an expert here
    routing.weights[1] = math.nan
    found = compute(kernels_of(sample, 4), sample, routing)
    routing.weights[1] = 0.0
    assert_same(found, samples.expected(sample, routing))
    assert (found[1] == 0).all()


@pytest.mark.parametrize(
    ("family", "dtype", "share"),
    [(family, dtype, 0.5) for family in ("qwen3_moe", "gpt_oss") for dtype in DTYPES]
    + [("qwen3_moe", torch.bfloat16, 0.0), ("qwen3_moe", torch.bfloat16, 1.0)],
)
def test_two_phases_give_the_same_bits_as_one(family: str, dtype: Any, share: float) -> None:
    sample = samples.sample_of(*samples.spec_of(family), dtype)
    routing = samples.routing_of(sample, tokens=2, top_k=4, sentinels=2)
    rows, memory = routing.rows(sample), sample.arena.memory.view(sample.arena.slots, -1)
    whole, there = compute(kernels_of(sample, 4, NARROW), sample, routing), memory.clone()
    lates = torch.rand(sample.experts + 2, generator=torch.Generator().manual_seed(1)) < share
    late = lates[routing.index].reshape(-1).to(torch.int8).to(rows.device)
    kernels, out = kernels_of(sample, 4, NARROW), torch.full_like(routing.x, math.nan)
    memory[rows[(late != 0) & (rows >= 0)].long()] = 0xFF  # not there yet
    kernels(routing.x, rows, late, routing.weights, out, Phase.EARLY)
    waits = ((late != 0) & (rows >= 0)).view(2, 4).any(dim=1)  # the others are done
    assert out[waits].isnan().all()
    assert torch.equal(out[~waits], whole[~waits])
    memory.copy_(there)
    memory[rows[(late == 0) & (rows >= 0)].long()] = 0xFF  # gone already
    kernels(routing.x, rows, late, routing.weights, out, Phase.LATE)
    assert torch.equal(out, whole)


def test_layers_can_share_what_passes_between_launches() -> None:
    sample = samples.sample_of(*samples.spec_of("olmoe"), torch.bfloat16)
    scratch = kernels_of(sample, 4, max_tokens=2).scratch
    routing = samples.routing_of(sample, tokens=2, top_k=4)
    kernels = kernels_of(sample, 4, scratch=scratch, max_tokens=2)
    assert kernels.scratch is scratch
    assert kernels_of(sample, 4, scratch=scratch, max_tokens=3).scratch is not scratch
    assert_same(compute(kernels, sample, routing), samples.expected(sample, routing))


def test_more_tokens_than_there_is_room_for_are_refused() -> None:
    sample = samples.sample_of(*samples.spec_of("olmoe"), torch.bfloat16)
    with pytest.raises(ValueError, match="up to 2 tokens"):
        compute(kernels_of(sample, 4, max_tokens=2), sample, samples.routing_of(sample, tokens=3, top_k=4))


def batch_of(sample: samples.Sample, routing: samples.Routing) -> ExpertBatch:
    return ExpertBatch(routing.x, routing.index.to(routing.x.device), routing.weights, sample.experts)


def host_driven(sample: samples.Sample, top_k: int) -> FewTokenKernels:
    many = GroupedKernels(sample.arena, sample.layout, sample.spec)
    found = with_triton(sample.arena, sample.layout, sample.spec, top_k, many)
    assert isinstance(found, FewTokenKernels)
    found.kernels._choices = dict.fromkeys(tuning.BUCKETS, NARROW)
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_host_computes_in_any_number_of_parts_to_the_same_bits(family: str, dtype: Any) -> None:
    sample = samples.sample_of(*samples.spec_of(family), dtype)
    routing = samples.routing_of(sample, tokens=3, top_k=4, sentinels=2)
    routing.index[1] = torch.arange(sample.experts, sample.experts + 4)  # a token without an expert here
    whole = compute(kernels_of(sample, 4, NARROW), sample, routing)
    assert_same(whole, samples.expected(sample, routing))
    kernels, experts = host_driven(sample, 4), batch_of(sample, routing).experts
    order = np.random.default_rng(0).permutation(experts)
    for cuts in ([], [3], [1, 2, 5], list(range(1, len(experts)))):
        batch = batch_of(sample, routing)
        assert kernels.prefers_one_run(batch)
        for part in np.split(order, cuts):
            kernels.run(batch, part, sample.slot(part))
        assert torch.equal(batch.combine(), whole)


def test_more_pairs_than_few_and_unknown_experts_are_computed_otherwise() -> None:
    sample = samples.sample_of(*samples.spec_of("qwen3_moe"), torch.float32)
    routing = samples.routing_of(sample, tokens=17, top_k=4)
    kernels, batch = host_driven(sample, 4), batch_of(sample, routing)
    assert not kernels.prefers_one_run(batch)
    kernels.run(batch, batch.experts, sample.slot(batch.experts))
    assert torch.equal(batch.combine(), samples.expected(sample, routing))
    routing = samples.routing_of(sample, tokens=6, top_k=1)  # as a model's own code calls its experts, one by one
    batch = batch_of(sample, routing)
    assert not kernels.prefers_one_run(batch)
    kernels.run(batch, batch.experts, sample.slot(batch.experts))
    assert torch.equal(batch.combine(), samples.expected(sample, routing))
    odd = ExpertSpec(sample.spec.up, sample.spec.down, torch.tanh)
    assert with_triton(sample.arena, sample.layout, odd, 4, kernels.many) is kernels.many


# What is exact in float32 in any order shows every rounding between the products.
def exact_sample(activation: Activation, *, transposed: bool) -> samples.Sample:
    columns = 2 * 24 if activation.gated else 24
    up, down = ((32, columns), (24, 32)) if transposed else ((columns, 32), (32, 24))
    spec = ExpertSpec("up", "down", activation, "bias", None, transposed, transposed)
    sample = samples.sample_of(spec, {"up": up, "down": down, "bias": (columns,)}, torch.bfloat16)
    for part in sample.layout.parts:
        values = sample.arena.view(part)[::2]
        values.copy_((values.float() * 16).round() / 8)
    return sample


@pytest.mark.parametrize("swapped", [False, True], ids=["one layout", "the other"])
@pytest.mark.parametrize("kind", [*_GATED, *_PLAIN], ids=lambda kind: kind[0].__name__)
def test_every_kind_rounds_as_torch_does(kind: Any, swapped: bool) -> None:
    gated = kind in _GATED
    transposed, interleaved = swapped, gated and swapped == (_GATED.index(kind) % 2 == 0)
    activation = Activation(*kind, gated, interleaved, 1.702, 7.0)
    sample = exact_sample(activation, transposed=transposed)
    routing = samples.routing_of(sample, tokens=1, top_k=2)
    routing.x.copy_((routing.x.float() * 8).round() / 4)
    kernels = kernels_of(sample, 2)
    assert kernels.activation.kind == activation.kind
    assert kernels.activation.interleaved == interleaved
    kernels.products.multiply_up(routing.x, Pairs(routing.rows(sample), None), WIDE, kernels.scratch)
    linear = kernels.up.linear
    slots = routing.rows(sample).tolist()
    products = [(routing.x.float() @ linear.matrix(slot).float()).bfloat16() + linear.biases[slot] for slot in slots]
    expected = activation(torch.cat(products))
    found = kernels.scratch.hidden[:2]
    units = (found.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    tiny = (found - expected).abs() < 1e-6  # GELU far below zero, where torch loses all digits
    assert ((units <= 1) | tiny).all()
    assert ((units == 0) | tiny).float().mean() > 0.95


@pytest.mark.parametrize(
    ("family", "changes", "kind", "interleaved"),
    [
        ("qwen3_moe", {}, "silu_and_mul", False),
        ("gpt_oss", {}, "clamped_glu", True),
        ("minimax_m3_vl", {}, "clamped_glu", False),
        ("deepseek_v4", {}, "clamped_silu_and_mul", False),
        ("step3p7", {"swiglu_limits": [0.0, 0.5, 0.5]}, "silu_clamped_and_mul", False),
        ("gemma4", {}, "gelu_tanh_and_mul", False),
        ("nemotron_h", {}, "relu2", False),
        ("switch_transformers", {}, "relu", False),
        ("llama4", {}, "silu_and_mul", False),
    ],
)
def test_the_kind_is_found_by_running_the_gate(
    family: str, changes: dict[str, Any], kind: str, interleaved: bool
) -> None:
    if family not in samples.tiny.families():
        pytest.skip("this transformers does not have it")
    found = activation_of(samples.spec_of(family, **changes)[0])
    assert found is not None
    assert (found.kind, found.interleaved) == (kind, interleaved)


def test_a_gate_that_rounds_otherwise_is_another_kind() -> None:
    def at_once(both: Any) -> Any:
        gate, up = both.float().chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(both.dtype)

    found = activation_of(at_once)
    assert found is not None
    assert found.kind == "silu_and_mul_at_once"


@pytest.mark.parametrize(
    "gate",
    [
        lambda both: torch.tanh(both.chunk(2, dim=-1)[0]) * both.chunk(2, dim=-1)[1],
        lambda both: torch.nn.functional.silu(both.chunk(2, dim=-1)[0]).clamp(max=5e3) * both.chunk(2, dim=-1)[1],
        lambda both: both.reshape(7, -1),
        lambda first, second: first * second,
    ],
)
def test_an_unknown_gate_is_no_kind(gate: Any) -> None:
    assert activation_of(gate) is None


def test_what_is_not_supported_is_said_in_words() -> None:
    layout = SlotLayout.of([Part("up", (16, 8), "bfloat16"), Part("down", (8, 8), "bfloat16")])

    def gate(both: Any) -> Any:
        first, second = both.chunk(2, dim=-1)
        return torch.nn.functional.silu(first) * second

    assert TritonExperts.supports(ExpertSpec("up", "down", gate), layout) is None
    assert "norm" in TritonExperts.supports(ExpertSpec("up", "down", gate, norm=torch.nn.Identity()), layout)
    assert "kinds" in TritonExperts.supports(ExpertSpec("up", "down", torch.tanh), layout)
    assert "columns" in TritonExperts.supports(ExpertSpec("up", "down", torch.relu), layout)
    quantised = SlotLayout.of([Part("up", (16, 8), "float8_e4m3fn"), Part("down", (8, 8), "bfloat16")])
    assert "float8" in TritonExperts.supports(ExpertSpec("up", "down", gate), quantised)
    with pytest.raises(ValueError, match="norm"):
        TritonExperts(None, layout, ExpertSpec("up", "down", gate, norm=gate), top_k=1)


PROBLEM = Problem("up", 768, 2048, "bfloat16", False, True, 1, 8)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Choice]:
    """A device whose last candidate is the fastest; returns what was timed on it."""
    timed: list[Choice] = []

    def milliseconds(_: Any, choice: Choice) -> float:
        timed.append(choice)
        return 1.0 / len(timed)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HOTSET_TUNE", raising=False)
    monkeypatch.setattr(tuning, "_milliseconds", milliseconds)
    monkeypatch.setattr(tuning, "_remembered", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "some device")
    return timed


def choose(problem: Problem = PROBLEM, device: str = "cuda") -> Choice:
    return tuning.chosen(problem, lambda _: None, torch.device(device))


def test_a_choice_is_timed_once_and_found_again(measured: list[Choice], monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_them = tuning.candidates(PROBLEM)
    assert choose() == all_of_them[-1]
    assert measured == all_of_them
    assert choose() == all_of_them[-1]
    monkeypatch.setattr(tuning, "_remembered", {})  # as in the next process
    assert choose() == all_of_them[-1]
    assert measured == all_of_them
    choose(PROBLEM._replace(pairs=64))
    assert len(json.loads(tuning.path().read_text())["some device"]) == 2
    assert len(list(tuning.path().parent.iterdir())) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"some device": []}', '{"some device": {"KEY": [1, 2]}}'])
def test_a_damaged_file_is_written_anew(measured: list[Choice], text: str) -> None:
    tuning.path().parent.mkdir(parents=True)
    tuning.path().write_text(text.replace("KEY", PROBLEM.key))
    assert choose() == tuning.candidates(PROBLEM)[-1]
    assert json.loads(tuning.path().read_text())["some device"][PROBLEM.key] == list(choose())


def test_a_folder_that_takes_no_file_is_no_reason_to_stop(measured: list[Choice], tmp_path: Path) -> None:
    (tmp_path / "hotset").write_text("in the way")
    assert choose() == tuning.candidates(PROBLEM)[-1]


def test_nothing_is_timed_without_a_device_or_a_wish(measured: list[Choice], monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(device="cpu") == tuning.default(PROBLEM)
    monkeypatch.setenv("HOTSET_TUNE", "0")
    assert choose() == tuning.default(PROBLEM)
    assert measured == []


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kernel", ["up", "down"])
def test_candidates_are_powers_of_two_that_fit(kernel: str, transposed: bool, group: int) -> None:
    for n, k in ((24, 20), (768, 2048), (2880, 2880)):
        problem = Problem(kernel, n, k, "bfloat16", transposed, kernel == "up", group, 8)
        for choice in tuning.candidates(problem):
            assert all(number & (number - 1) == 0 for number in choice[:3])
            assert choice.block_n < 2 * n
            assert choice.block_k < 2 * k or choice.block_k == 16


def test_warming_up_leaves_a_choice(measured: list[Choice]) -> None:
    sample = samples.sample_of(*samples.spec_of("qwen3_moe"), torch.bfloat16)
    kernels = kernels_of(sample, 2, None)
    kernels.warm_up(1)
    assert set(kernels._choices) == {1}


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_captured_call_serves_new_input_without_allocating() -> None:
    sample = samples.sample_of(*samples.spec_of("qwen3_moe"), torch.bfloat16)
    kernels = kernels_of(sample, 4, None)
    first, second = (samples.routing_of(sample, tokens, 4) for tokens in (3, 3))
    second.x.neg_()
    second.index = second.index.flip(0)
    kernels.warm_up(3)
    x, rows, weights, out = first.x.clone(), first.rows(sample), first.weights.clone(), torch.empty_like(first.x)
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_allocated()
    with torch.cuda.graph(graph):
        kernels(x, rows, None, weights, out)
    assert torch.cuda.memory_allocated() <= before + 1024  # a graph keeps two numbers of the random generator
    for routing in (first, second):
        x.copy_(routing.x)
        rows.copy_(routing.rows(sample))
        graph.replay()
        assert_same(out, samples.expected(sample, routing))
