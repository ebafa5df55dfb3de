"""How many slots experts pass through, and who needs them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hotset.cache.plan import Scope  # noqa: E402
from hotset.models.budget import default_staging, plan_slots  # noqa: E402
from hotset.shape import ModelShape  # noqa: E402


@pytest.mark.parametrize(("top_k", "cpu", "host", "device"), [(1, 2, 2, 2), (4, 4, 4, 4), (8, 4, 8, 8), (10, 4, 8, 10)])
def test_a_token_fits_where_the_device_drives(top_k: int, cpu: int, host: int, device: int) -> None:
    shape = ModelShape(2, 32, top_k, 1)
    found = [default_staging(shape, on_gpu, by) for on_gpu, by in ((False, False), (True, False), (True, True))]
    assert found == [cpu, host, device]


@pytest.mark.parametrize(("size", "staging"), [(64, 10), (18, 8), (11, 1)])
def test_a_budget_in_bytes_rules(size: int, staging: int) -> None:
    plan = plan_slots(
        f"{size}B", ModelShape(2, 32, 10, 1), scope=Scope.LAYER, staging=None, free_bytes=0, on_gpu=True, by_device=True
    )
    assert (plan.cached, plan.staging) == (size - staging, staging)


def test_whoever_names_the_staging_gets_it() -> None:
    plan = plan_slots(
        "40 slots", ModelShape(2, 32, 4, 1), scope=Scope.LAYER, staging=16, free_bytes=0, on_gpu=True, by_device=True
    )
    assert (plan.cached, plan.staging) == (40, 16)
