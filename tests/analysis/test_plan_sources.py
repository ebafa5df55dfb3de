"""Where a plan's parts come from: workloads, models by their numbers, kept calibrations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plan_samples import MODEL, SIZE, curve

from hotset import reference
from hotset.analysis.planner import calibration
from hotset.analysis.planner.calibration import Calibration, CpuFigures, GpuFigures
from hotset.analysis.planner.hits import replay_hits
from hotset.analysis.planner.machines import Told, assumed, memory_of, parse_target, rates_elsewhere, rates_here
from hotset.analysis.planner.rates import Engine, ExpertPoint, gpu_rates
from hotset.analysis.planner.shapes import PRESETS, parse_shape
from hotset.analysis.planner.tiers import Memory
from hotset.analysis.planner.workload import generic, like, profiled, recorded
from hotset.cli.plan_sources import replayed
from hotset.errors import HotsetError
from hotset.profile import Fingerprint, Profile
from hotset.shape import ModelShape
from hotset.trace import Phase
from hotset.trace.synth import SynthConfig, synthesise

CPU = CpuFigures(
    memory_bytes_per_s=2e10, layer_s=1e-3, event_s=1e-4, partial_s=0.0, miss_s=2e-4, read_s=1e-4, disk_bytes_per_s=2e9,
    busy=0.9, kept=0.6, threads=2,
)  # fmt: skip
POINT = ExpertPoint("bfloat16", MODEL.matrices, SIZE, 1e-4, 1e-3)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calibration:
    """A calibration of this machine, in a folder of the test's own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    found = Calibration(calibration.machine_name(), "2026-11-17", CPU, [POINT])
    calibration.save(found)
    return found


def test_a_workload_of_the_reference_model_is_its_own_trace() -> None:
    shape = reference.trace("it").shape
    own, scaled = like("it", shape), like("it", ModelShape(4, 32, 4))
    assert own.trace.tokens == reference.trace("it").tokens
    assert own.misses_spread == 0
    assert own.note is None
    assert scaled.trace.shape == ModelShape(4, 32, 4)
    assert scaled.misses_spread > 0
    assert scaled.note
    with pytest.raises(HotsetError, match='--like knows no "klingon": there are en_prose'):
        like("klingon", shape)


def test_a_generic_workload_says_so_and_is_as_local_as_its_original() -> None:
    found = generic(ModelShape(8, 64, 8))
    assert "generic" in (found.note or "")
    traces = (found.trace, like("it", found.trace.shape).trace)
    rates = [replay_hits(trace, ("blend",)).curves["blend"].hit_rate(128) for trace in traces]
    assert abs(rates[0] - rates[1]) < 0.1


def test_a_trace_of_another_model_is_refused() -> None:
    trace = reference.trace("it")
    assert recorded(trace, trace.shape, "it").trace is trace
    with pytest.raises(HotsetError, match="8 x 64 experts, top 8, and the model has 4 x 32 experts, top 4"):
        recorded(trace, ModelShape(4, 32, 4), "it")


def test_a_profile_becomes_a_workload_with_its_hot_experts(tmp_path: Path) -> None:
    shape = ModelShape(2, 16, 2)
    uses = np.full((2, 2, 16), 0.01)
    uses[Phase.DECODE, :, :3] = 100.0
    profile = Profile(shape, Fingerprint("tiny", "0"), uses, np.array([0, 300]), *["2026-11-17T00:00:00Z"] * 2)
    profile.save(tmp_path / "hot.safetensors")
    found = profiled(tmp_path / "hot.safetensors", shape)
    assert np.isin(found.trace.experts, [0, 1, 2]).mean() > 0.95
    assert replay_hits(found.trace, ("lru",)).curves["lru"].hit_rate(8) > 0.9
    assert found.misses_spread > 0
    with pytest.raises(HotsetError, match="give a profile of this model"):
        profiled(tmp_path / "hot.safetensors", ModelShape(2, 8, 2))


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("layers=2", "lacks experts, top_k, hidden, intermediate"),
        ("layers=2,experts=x,top_k=2,hidden=64,intermediate=64", "experts is a whole number"),
        ("layers=2,wheels=4", 'has no "wheels"'),
        ("layers=0,experts=4,top_k=2,hidden=64,intermediate=64", "layers of --shape"),
        ("layers=2,experts=4,top_k=9,hidden=64,intermediate=64", "top_k"),
        ("layers=2,experts=4,top_k=2,hidden=64,intermediate=64,own=q5", "own is one of"),
        ("nonsense", 'has no "nonsense"'),
    ],
)
def test_shapes_that_cannot_be(words: str, match: str) -> None:
    with pytest.raises(HotsetError, match=match):
        parse_shape(words, 512).shape  # noqa: B018 - it is checked there


@pytest.mark.parametrize("name", PRESETS)
def test_published_models_have_their_published_sizes(name: str) -> None:
    billions = {"qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8,
                "mixtral-8x7b": 46.7, "olmoe-1b-7b": 6.9}  # fmt: skip
    model = parse_shape(name, 512)
    weights = model.dense_bytes / 2 + model.layers * model.experts * model.expert_weights
    assert weights / 1e9 == pytest.approx(billions[name], rel=0.02)


def test_a_calibration_is_kept_and_read_again(kept: Calibration) -> None:
    calibration.save(kept.with_curve(curve((0, 0, 2))))
    found = calibration.load()
    assert found is not None
    assert found.cpu == CPU
    assert list(found.experts) == [POINT]
    known = found.curve(MODEL.shape)
    assert known is not None
    assert known.hit_rate(8) == 1
    assert found.curve(ModelShape(3, 4, 2)) is None
    assert found.rates().miss_bytes_per_s == 2e9
    assert "2026-11-17" in found.rates().source


def test_a_calibration_that_is_not_this_machines_is_none(kept: Calibration) -> None:
    calibration.save(replace(kept, machine="another x 64"))
    assert calibration.load() is None


@pytest.mark.parametrize(
    "damage", ["{", "[]", "null", '{"version": 2}', '{"version": 1, "cpu": {}}', "negative", "no experts", "few"]
)
def test_a_damaged_calibration_is_none(kept: Calibration, damage: str) -> None:
    document = kept.as_dict()
    if damage == "negative":
        document["cpu"]["disk_bytes_per_s"] = -1
    if damage == "no experts":
        document["experts"] = []
    if damage == "few":
        document["experts"][0] = {**document["experts"][0], "few_s": 0.0}
    words = json.dumps(document) if damage in ("negative", "no experts", "few") else damage
    calibration.path().write_text(words)
    assert calibration.load() is None


def test_rates_here_take_what_was_said(kept: Calibration) -> None:
    assert rates_here(kept, Told(disk="1GB/s"))(Engine.CPU).miss_bytes_per_s == 1e9
    with pytest.raises(HotsetError, match="the rates of a GPU are not measured"):
        rates_here(kept, Told())(Engine.DEVICE)
    gpu = GpuFigures(name="G", memory_bytes_per_s=1e12, link_bytes_per_s=2e10, layer_s=1e-4, host_layer_s=None)
    rates_of = rates_here(replace(kept, gpu=gpu), Told(gpu="8GiB", link="5GB/s", disk="1GB/s"))
    assert rates_of(Engine.HOST).miss_bytes_per_s == 5e9
    assert rates_of(Engine.HOST).far_bytes_per_s == 1e9
    assert rates_of(Engine.DEVICE).layer_s == 1e-4
    assert rates_of(Engine.DEVICE).prompt_miss_bytes_per_s == 5e9


def test_a_measured_gpu_is_kept_and_read_again(kept: Calibration) -> None:
    gpu = GpuFigures(
        name="G", memory_bytes_per_s=1e12, link_bytes_per_s=2e10, layer_s=None, host_layer_s=None,
        expert_bytes_per_s=8e11,
    )  # fmt: skip
    calibration.save(replace(kept, machine=calibration.machine_name("G"), gpu=gpu))
    found = calibration.load()
    assert found is not None
    assert found.gpu == gpu
    elsewhere, here = gpu_rates(1e12, 2e10, 2e9, host=False), found.gpu_rates(host=False)
    assert here.expert_s("bfloat16", MODEL.matrices, SIZE) == pytest.approx(SIZE / 8e11)
    better = elsewhere.expert_s("int4", MODEL.matrices, SIZE) / here.expert_s("int4", MODEL.matrices, SIZE)
    assert better == pytest.approx(0.8 / 0.53)  # as much as plain experts
    slow = replace(found, gpu=replace(gpu, expert_bytes_per_s=1e10)).gpu_rates(host=False)  # launches, not products
    assert slow.expert_s("int4", MODEL.matrices, SIZE) == elsewhere.expert_s("int4", MODEL.matrices, SIZE)
    calibration.save(replace(found, gpu=replace(gpu, link_bytes_per_s=0.0)))
    assert calibration.load() is None


def test_what_is_not_told_of_a_gpu_is_assumed_and_said() -> None:
    told = Told(gpu="12GiB", ram="32GiB", disk="3GB/s", link="25GB/s")
    told.check()
    (line,) = assumed(told)
    assert "--memory-bandwidth was not given" in line
    assert "500 GB/s" in line
    known = replace(told, memory_bandwidth="500GB/s")
    assert assumed(known) == []
    guess, sure = (rates_elsewhere(each)(Engine.DEVICE) for each in (told, known))
    assert replace(guess, spread=sure.spread, source=sure.source) == sure
    assert guess.spread > 2 * sure.spread
    assert "taken from one with two cores" in assumed(Told(ram="32GiB", disk="3GB/s", memory_bandwidth="60GB/s"))[0]
    lines = assumed(Told(gpu="12GiB"))
    assert [line.split()[0] for line in lines] == ["--memory-bandwidth", "--link", "--disk"]
    assert len(assumed(Told(gpu="12GiB"), disk_known=True)) == 2
    assert rates_elsewhere(Told(gpu="12GiB"), 7e9)(Engine.HOST).far_bytes_per_s == 7e9


def test_machines_elsewhere_and_their_memory() -> None:
    told = Told(gpu="12GiB", ram="32GiB", link="25GB/s", memory_bandwidth="1TB/s")
    told.check()
    rates_of = rates_elsewhere(told)
    assert rates_of(Engine.CPU).memory_bytes_per_s == rates_of(Engine.DEVICE).memory_bytes_per_s == 1e12
    assert memory_of(told, lambda: 1, lambda: 2) == Memory(32 << 30, 12 << 30)
    assert memory_of(Told(), lambda: 1, lambda: 2) == Memory(1, 2)
    assert memory_of(Told(gpu="0"), lambda: 1, lambda: 2) == Memory(1, None)
    assert memory_of(Told(memory_bandwidth="1TB/s"), lambda: 1, lambda: 2) == Memory(1, None)


@pytest.mark.parametrize(
    ("told", "match"),
    [
        (Told(link="25GB/s"), "--link is between RAM and a GPU"),
        (Told(gpu="0", link="25GB/s"), "--link is between RAM and a GPU"),
        (Told(disk="0GB/s"), "--disk must be above 0"),
        (Told(disk="fast"), "--disk: cannot read the speed"),
        (Told(memory_bandwidth="-1"), '--memory-bandwidth: cannot read the speed "-1"'),
        (Told(ram="0"), "--ram must be above 0"),
    ],
)
def test_what_does_not_go_together(told: Told, match: str) -> None:
    with pytest.raises(HotsetError, match=match):
        told.check()


def test_nextuse_is_compared_where_a_cpu_computes_and_routing_is_recorded() -> None:
    trace = synthesise(SynthConfig(layers=2, experts=8, top_k=2, requests=8, prompt_tokens=0, new_tokens=8))
    cpu, gpu = Memory(1 << 30), Memory(1 << 30, 1 << 30)
    assert set(replayed(recorded(trace, trace.shape, "t"), cpu).curves) == {"blend", "lru", "nextuse", "belady"}
    assert set(replayed(recorded(trace, trace.shape, "t"), gpu).curves) == {"blend", "lru", "belady"}
    assert set(replayed(generic(trace.shape), cpu).curves) == {"blend", "lru", "belady"}  # drawn: nothing to learn
    assert set(replayed(generic(trace.shape)).curves) == {"blend", "lru", "belady"}


def test_targets_are_rates() -> None:
    assert [parse_target(text) for text in ("20tok/s", "20 tokens/s", "2.5t/s", "7/s")] == [20, 20, 2.5, 7]
    for text in ("20", "fast", "0tok/s", "-3tok/s", "20tok/min", "1e9tok/s"):
        with pytest.raises(HotsetError, match="cannot read the target"):
            parse_target(text)
