"""The plan of each driver, and what it makes of few rows."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from hotset.errors import HotsetError
from hotset.prefetch import MIN_PROBABILITY, Claim, Driver, PrefetchPlan, PrefetchTrial, plan_prefetch, prefetch_rows
from hotset.shape import ModelShape

SHAPE = ModelShape(8, 64, 8, 1 << 20)


def test_hosts_take_a_row_per_expert_of_a_token_up_to_four() -> None:
    for top_k, rows in ((1, 1), (2, 2), (4, 4), (8, 4)):
        shape = ModelShape(8, 64, top_k)
        assert prefetch_rows("cpu", shape) == prefetch_rows(Driver.HOST, shape) == rows
        assert plan_prefetch("cpu", shape).rows_per_part == rows


@pytest.mark.parametrize(("size", "rows", "each"), [(1 << 20, 6, 2), (16 << 20, 3, 1), (None, 6, 2)])
def test_a_device_splits_its_rows_among_the_layer_at_work_and_two_ahead(size: int | None, rows: int, each: int) -> None:
    plan = plan_prefetch("device", ModelShape(8, 64, 8, size))
    assert (plan.rows, plan.parts, plan.rows_per_part, plan.reach) == (rows, 3, each, 2)


@pytest.mark.parametrize(("rows", "parts", "each", "reach"), [(5, 3, 1, 2), (2, 2, 1, 1), (1, 1, 1, 0), (0, 1, 0, 0)])
def test_few_rows_shorten_the_reach_of_a_device(rows: int, parts: int, each: int, reach: int) -> None:
    plan = plan_prefetch("device", SHAPE, rows=rows)
    assert (plan.parts, plan.rows_per_part, plan.reach) == (parts, each, reach)


def test_the_rules_of_the_drivers_differ_where_they_must() -> None:
    cpu, host, device = (plan_prefetch(driver, SHAPE) for driver in Driver)
    same = {"rows", "layers_ahead", "max_ranks", "min_probability", "wraps", "adaptive", "layer_trial", "trial"}
    assert all(getattr(cpu, name) == getattr(host, name) for name in same)
    assert (cpu.claim, cpu.cancels, host.claim, host.cancels) == (Claim.REST, True, Claim.BATCH, False)
    assert (device.wraps, device.adaptive, device.layer_trial) == (False, False, False)
    assert (device.predicted_only, device.requeues, device.adjusts_times) == (True, True, True)
    assert {plan.min_probability for plan in (cpu, host, device)} == {MIN_PROBABILITY}
    assert {plan.max_ranks for plan in (cpu, host, device)} == {2 * SHAPE.top_k}


def test_ranks_are_no_more_than_experts_and_a_forced_forecast_has_no_trial() -> None:
    plan = plan_prefetch("cpu", ModelShape(2, 5, 4), trial=False)
    assert (plan.max_ranks, plan.trial) == (5, False)


@pytest.mark.parametrize(
    "wrong", [{"rows": -1}, {"rows": 1.5}, {"layers_ahead": 0}, {"layers_ahead": 4}, {"min_probability": -0.1},
              {"max_ranks": 0}, {"driver": "tpu"}],
)  # fmt: skip
def test_plans_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(HotsetError):
        replace(plan_prefetch("cpu", SHAPE), **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["wraps", "adaptive", "layer_trial"])
def test_a_rule_that_the_device_does_not_follow_is_not_in_its_plan(rule: str) -> None:
    assert getattr(plan_prefetch("cpu", SHAPE), rule)
    assert getattr(plan_prefetch("host", SHAPE), rule)
    with pytest.raises(HotsetError, match=f"{rule} is a rule of hosts: leave it out"):
        replace(plan_prefetch("device", SHAPE), **{rule: True})  # type: ignore[arg-type]


def test_every_field_is_one_that_a_driver_follows() -> None:
    """Each has a test of the live host and the simulator in tests/engine/host/test_followed_plan.py."""
    assert {field.name for field in fields(PrefetchPlan)} == {
        "driver", "rows", "layers_ahead", "max_ranks", "min_probability", "trial", "wraps", "adaptive", "layer_trial",
    }  # fmt: skip


def test_the_trial_of_a_plan_has_its_rules() -> None:
    for rules in ({}, {"trial": False}, {"adaptive": False}, {"layer_trial": False}, {"rows": 3}):
        plan = replace(plan_prefetch("host", SHAPE), **rules)  # type: ignore[arg-type]
        options = PrefetchTrial.of(plan, SHAPE.layers).state.options.tolist()
        assert options == [plan.trial, plan.rows, plan.adaptive, plan.layer_trial]
