"""A model that the device drives under `nextuse` and `late`: the host's text, books and rows, whoever served last."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton")

import tiny_device  # noqa: E402
from tiny_device import DEVICE, greedy  # noqa: E402

from hotset import policies  # noqa: E402
from hotset.cache.controller import Controller  # noqa: E402
from hotset.engine import support  # noqa: E402

pytestmark = [
    pytest.mark.skipif(tiny_device.LATE, reason="the interpreter came too late"),
    pytest.mark.filterwarnings("ignore"),
]
ONE = torch.tensor([[5, 90, 31]], device=DEVICE)
TWO = torch.tensor([[9, 8], [7, 41]], device=DEVICE)
NEW = 24 if CUDA else 7
LAYERS, EXPERTS, TOP_K, SLOTS = 2, 8, 2, 8
POLICIES = ["nextuse", "blend:admit=late"]


@pytest.fixture(autouse=True)
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_TUNE", "0")
    monkeypatch.setattr(support, "LATE_HAS_RUN", True)
    tiny_device.go_without_graphs(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_device.make(tmp_path_factory.mktemp("nextuse") / "tiny", LAYERS, EXPERTS, TOP_K)


@pytest.fixture(scope="module")
def stock(folder: Path) -> Any:
    return tiny_device.stock_of(folder)


def load(folder: Path, policy: str, **options: Any) -> Any:
    return tiny_device.load(folder, SLOTS, policy, 2 * TOP_K, **options)


def contrary(controller: Controller) -> Controller:
    """Have a policy keep what is used least, so that events evict what they use."""
    controller.state.shared[:] *= -1
    return controller


def learnt(controller: Controller) -> dict[str, Any]:
    """What a policy knows, but for scratch."""
    return {name: array for name, array in controller.state._asdict().items() if name not in ("scratch", "rows")}


def check_rows(model: Any) -> None:
    """Once the host has the cache, every row is in one place."""
    cache = model.hotset.engine.cache
    cache.reclaim()
    assert sorted([*cache.rows.tolist(), *cache.staging, *cache.prefetch_rows]) == list(range(cache.num_rows))
    assert cache.staging is model.hotset.engine.offload.mover.staging


@pytest.mark.parametrize("policy", POLICIES)
def test_it_serves_what_the_host_would_have_served(folder: Path, stock: Any, policy: str, tmp_path: Path) -> None:
    """One sequence, two, and one again, with their prompts; then a replay of the recording."""
    found = []
    for install in (True, False):
        model = load(folder, policy, install=install)
        contrary(model.hotset.engine.controller)
        with model.hotset.trace(tmp_path / f"{install}.safetensors") as recording:
            texts = [greedy(model, NEW, ids) for ids in (ONE, TWO, ONE)]
        stats = model.hotset.stats()
        assert stats["driven_by"] == ("device" if install else "host")
        assert not install or model.hotset.engine.device_decode.steps.differences() == 0
        assert texts == [greedy(stock, NEW, ids) for ids in (ONE, TWO, ONE)]
        controller = model.hotset.engine.controller
        followed = {name: array.copy() for name, array in learnt(controller).items()}
        check_rows(model)
        assert not model.hotset.engine.cache.staging_in_order
        for name, array in learnt(controller).items():  # what the device knew is what its follower had learnt
            np.testing.assert_array_equal(array, followed[name], err_msg=name)
        counted = {key: stats[key] for key in ("hits", "misses", "loaded_bytes", "tokens")}
        found.append((texts, counted, controller.residents(), learnt(controller)))
        trace, plan = recording.finish(), controller.plan
        model.hotset.close()
    (texts, counted, residents, known), theirs = found
    assert (texts, counted, residents) == theirs[:3]
    for name, array in theirs[3].items():
        np.testing.assert_array_equal(known[name], array, err_msg=name)
    again = contrary(Controller(plan, policies.parse(policy)))
    counters = again.replay(trace.events()).counters.as_dict()
    assert (counters["hits"], counters["misses"]) == (counted["hits"], counted["misses"])
    assert again.residents() == residents


def test_host_and_device_take_turns_with_exchanged_rows(folder: Path, stock: Any) -> None:
    """A decode step of the host between those of the device: each goes on with the rows that the other left."""
    from transformers import DynamicCache

    model, moved = load(folder, "nextuse"), 0
    cache = model.hotset.engine.cache
    contrary(cache.controller)
    for ids in (ONE, TWO, ONE):
        assert greedy(model, NEW, ids) == greedy(stock, NEW, ids)
        check_rows(model)
        moved += not cache.staging_in_order
        by_host = greedy(model, 3, ids, past_key_values=DynamicCache(config=model.config))
        assert by_host == greedy(stock, 3, ids)
        check_rows(model)
    assert moved > 0
    model.hotset.close()


def test_another_policy_goes_on_with_staging_anywhere(folder: Path, stock: Any) -> None:
    """Rows that `late` has exchanged stay where they are; `lru` then has a list of them."""
    model = load(folder, "nextuse")
    engine = model.hotset.engine
    contrary(engine.controller)
    assert greedy(model, NEW, TWO) == greedy(stock, NEW, TWO)
    with engine.paused():
        engine.controller.adopt(Controller(engine.controller.plan, policies.parse("lru")))
    assert not engine.cache.staging_in_order
    for ids in (ONE, TWO):
        assert greedy(model, NEW, ids) == greedy(stock, NEW, ids)
        model.hotset.stats()
        assert engine.device_decode.steps.differences() == 0
        check_rows(model)
    assert model.hotset.stats()["driven_by"] == "device"
    model.hotset.close()


def test_rows_that_lost_their_order_make_other_kernels(folder: Path, stock: Any) -> None:
    """As after a failure on the host, which hands the rows out anew."""
    model = load(folder, "lru")
    engine = model.hotset.engine
    assert greedy(model, 3, ONE) == greedy(stock, 3, ONE)
    kernels = engine.device_decode.steps.kernels_for(1)
    assert kernels.plan.staging is None
    engine.cache.reclaim()
    engine.cache.staging.reverse()
    assert engine.device_decode.steps.is_outdated
    assert greedy(model, 3, ONE) == greedy(stock, 3, ONE)
    assert engine.device_decode.steps.kernels_for(1).plan.staging is not None
    model.hotset.close()


def test_predictions_go_with_it(folder: Path, stock: Any) -> None:
    model = load(folder, "nextuse", ahead=4)
    contrary(model.hotset.engine.controller)
    for ids in (ONE, TWO):
        assert greedy(model, NEW, ids) == greedy(stock, NEW, ids)
    model.hotset.stats()
    assert model.hotset.engine.device_decode.steps.differences() == 0
    check_rows(model)
    model.hotset.close()


def test_more_requests_than_streams_go_the_hosts_way(folder: Path, stock: Any) -> None:
    model = load(folder, "nextuse:streams=1")
    assert greedy(model, 3, TWO) == greedy(stock, 3, TWO)
    assert model.hotset.stats()["driven_by"] == "host"
    assert [note for note in model.hotset.notes if "nextuse follows 1 request" in note]
    assert greedy(model, 3, ONE) == greedy(stock, 3, ONE)
    assert model.hotset.stats()["driven_by"] == "device"
    model.hotset.close()


def test_until_it_was_run_on_a_gpu_the_host_drives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "LATE_HAS_RUN", False)
    for policy in POLICIES:
        model = load(folder, policy, install=False)
        assert "not been run on a GPU yet" in model.hotset.engine.device_decode.unsupported_reasons()[0]
        model.hotset.close()
