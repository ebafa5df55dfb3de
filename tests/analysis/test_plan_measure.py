"""The calibration measures with the engine's real parts: readers, products, steps of the reference model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hotset import reference
from hotset.analysis.planner import measure_experts, measure_gpu, measure_reads, measuring
from hotset.analysis.planner.inspecting import inspect_model
from hotset.analysis.planner.measuring import Effort, Subject, measure, measurements
from hotset.errors import HotsetError

MATRICES = ((128, 64), (64, 64))
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure_experts, "POOL_BYTES", 1 << 20)
    monkeypatch.setattr(measure_reads, "SAMPLE_BYTES", 16 << 20)
    monkeypatch.setattr(measure_reads, "_BESIDE", ("bfloat16", MATRICES))
    monkeypatch.setattr(measuring, "SHAPES", ())
    monkeypatch.setattr(measuring, "SPECS", {"bfloat16": "dense", "int4": "integer:short=on"})
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))


def test_a_machine_is_measured(tmp_path: Path) -> None:
    calls: list[None] = []
    subject = Subject(MATRICES, 64 << 10)
    found = measure(tmp_path, subject, Effort(0.01, 2), advance=lambda: calls.append(None))
    assert len(calls) == measurements(subject)
    assert [(point.precision, point.matrices) for point in found.experts] == [
        ("bfloat16", MATRICES),
        ("int4", MATRICES),
    ]
    assert all(point.one_s > 0 and point.many_s > 0 for point in found.experts)
    assert found.cpu.disk_bytes_per_s > 1e6
    assert 0 < found.cpu.busy <= 1
    assert 0 < found.cpu.kept <= 1
    assert found.cpu.layer_s > 0
    assert min(found.cpu.event_s, found.cpu.partial_s, found.cpu.miss_s) >= 0
    assert [path for path in tmp_path.iterdir() if path.name != "xdg"] == []  # the sample is gone
    rates = found.rates()
    assert rates.expert_s("int4", MATRICES, found.experts[1].expert_bytes) == found.experts[1].one_s


def test_packed_experts_are_measured_with_few_tokens() -> None:
    found = measure_experts.measure_expert("int4", MATRICES, 0.01)
    assert found.few_s is not None
    assert found.few_s > 0


def test_a_gpu_is_measured_by_the_calls_that_a_cpu_has_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((0.5, 0.25, 2.0))  # of a copy within, a copy over the link, and the products
    monkeypatch.setattr(measure_gpu, "COPIED_BYTES", 1 << 20)
    monkeypatch.setattr(measure_gpu, "MATRICES", MATRICES)
    monkeypatch.setattr(measure_gpu, "usual_s", lambda call, _: call() or next(seconds))
    found = measure_gpu.measure_gpu(torch.device("cpu"), 0.01)
    assert found.memory_bytes_per_s == 2 * (1 << 20) / 0.5
    assert found.link_bytes_per_s == (1 << 20) / 0.25
    weights = 128 * 64 + 64 * 64
    assert found.expert_bytes_per_s == (2 << 20) // (2 * weights) * 2 * weights / 2.0
    assert found.name == "cpu"


def test_a_machine_with_a_gpu_keeps_its_rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure_gpu, "COPIED_BYTES", 1 << 20)
    monkeypatch.setattr(measure_gpu, "MATRICES", MATRICES)
    monkeypatch.setattr(measuring, "gpu_here", lambda: torch.device("cpu"))
    calls: list[None] = []
    found = measure(tmp_path, Subject(MATRICES, 64 << 10), Effort(0.01, 2), advance=lambda: calls.append(None))
    assert len(calls) == measurements(Subject(MATRICES, 64 << 10))
    assert found.gpu is not None
    assert min(found.gpu.memory_bytes_per_s, found.gpu.link_bytes_per_s) > 1e6
    assert found.machine.endswith(", cpu")
    assert found.gpu_rates(host=True).prompt_miss_bytes_per_s == found.gpu.link_bytes_per_s


def test_a_gpu_without_room_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> float:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(measure_gpu, "COPIED_BYTES", 1 << 20)
    monkeypatch.setattr(measure_gpu, "usual_s", full)
    with pytest.raises(HotsetError, match=r"the GPU cannot be measured \(no room\): close other programs"):
        measure_gpu.measure_gpu(torch.device("cpu"), 0.01)


def test_reads_are_checked_and_of_whole_pages(tmp_path: Path) -> None:
    file = tmp_path / "experts"
    file.write_bytes(bytes(range(256)) * 4096)
    found = measure_reads.measure_disk(file, 100_000, 0.01)
    assert found.bytes_per_s > 1e6
    with pytest.raises(HotsetError, match="too small"):
        measure_reads.measure_disk(file, 1 << 20, 0.01)


def test_the_sizes_of_a_checkpoint_and_of_its_config_agree(tmp_path: Path) -> None:
    whole = inspect_model(None, 4096)
    (tmp_path / "config.json").write_bytes((reference.path() / "config.json").read_bytes())
    folder, file = (inspect_model(str(place), 4096) for place in (tmp_path, tmp_path / "config.json"))
    assert folder == file
    assert whole.there
    assert not folder.there
    for name in ("layers", "experts", "top_k", "matrices", "all_layers", "dense_bytes", "read_bytes", "context_bytes"):
        assert getattr(whole, name) == getattr(folder, name), name
    assert whole.own == folder.own == "bfloat16"
    assert [each.expert_bytes for each in whole.precisions()] == [each.expert_bytes for each in folder.precisions()]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "is not JSON"),
        ("[]", "names no model_type"),
        ('{"model_type": "no_such_model"}', "does not know the architecture"),
        ('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2}', "no experts"),
        (
            '{"model_type": "qwen3_moe", "quantization_config": {"quant_method": "gptq"}}',
            "whose sizes lie in the weights",
        ),
    ],
)
def test_configs_that_cannot_be_planned(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(HotsetError, match=match) as caught:
        inspect_model(str(tmp_path), 4096)
    assert "\n" not in str(caught.value)
