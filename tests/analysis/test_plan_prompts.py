"""The time to a first token, computed by hand from given rates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_samples import MODEL, PRECISION, RATES, SIZE

from hotset.analysis.planner.hits import popularity_of, replay_hits
from hotset.analysis.planner.model import Precision
from hotset.analysis.planner.prompts import FEW_RATIO, PromptTimes, expert_times_s
from hotset.analysis.planner.rates import FEW_TOKENS, Engine, ExpertPoint, weights_of
from hotset.analysis.planner.times import TokenTimes
from hotset.trace.synth import SynthConfig, synthesise

WEIGHTS = weights_of(MODEL.matrices)
EXPERT_S = SIZE / (0.5 * 1e9)
READ_S = 2 * WEIGHTS / (0.5 * 1e9)  # plain numbers of an expert
MOVE_S = SIZE / 1e8
TIMES = TokenTimes(MODEL, PRECISION, replace(RATES, flops_per_s=1e9))
FIXED_S = 2 * 1e-3 + 1e6 * 1000 / 1e9  # two layers, and all tokens by the weights that are no experts


def test_a_prompt_reads_every_expert_once_and_computes_all_tokens() -> None:
    found = PromptTimes(TIMES).first_token_s(1000, 1.0)
    experts_s = 4 * (READ_S + 2 * WEIGHTS * 500 / 1e9)
    assert found == pytest.approx(FIXED_S + 2 * (1e-4 + experts_s))


def test_what_is_missing_is_moved_and_counted_once_per_layer() -> None:
    found = PromptTimes(TIMES).first_token_s(1000, 0.0)
    experts_s = 4 * (READ_S + 2 * WEIGHTS * 500 / 1e9 + MOVE_S)  # one after the other: `kept` is 0
    assert found == pytest.approx(FIXED_S + 2 * (1e-4 + 2e-4 + 4 * 3e-4 + experts_s))


def test_what_waits_for_a_row_moves_only_once_residents_are_computed() -> None:
    # Of 4 experts one is resident. All are used; the other 3 pass through 2 rows: 2/3 of them move beside the resident.
    rates = replace(TIMES.rates, kept=1.0)
    found = PromptTimes(replace(TIMES, rates=rates)).first_token_s(1000, 0.25)
    each_s = READ_S + 2 * WEIGHTS * 500 / 1e9
    events_s = 1e-4 + 2e-4 + 3 * 3e-4 + max(each_s, 2 * MOVE_S) + max(3 * each_s, MOVE_S)
    assert found == pytest.approx(FIXED_S + 2 * events_s)


def test_popular_experts_are_resident_and_rare_ones_are_not_used() -> None:
    popular = PromptTimes(TIMES, np.array([1.0, 1.0, 0.0, 0.0]))
    half, whole = (popular.first_token_s(10, share) for share in (0.5, 1.0))
    assert half == pytest.approx(whole)  # the two that are used are there
    assert PromptTimes(TIMES).first_token_s(10, 0.5) > half


def test_parts_of_a_long_prompt_read_again() -> None:
    one, two = (PromptTimes(TIMES).first_token_s(tokens, 0.0) for tokens in (2048, 4096))
    assert two == pytest.approx(2 * one)


def test_a_gpu_computes_while_the_host_launches() -> None:
    rates = replace(TIMES.rates, engine=Engine.DEVICE, prompt_layer_s=2.0, prompt_miss_bytes_per_s=1e9)
    prompts = PromptTimes(replace(TIMES, rates=rates))
    assert prompts.first_token_s(1000, 1.0) == pytest.approx(2 * 2.0)  # the host is the slower one
    missing_s = prompts.first_token_s(1000, 0.0)
    assert missing_s > 2 * 2.0 + 1e6 * 1000 / 1e9  # it waits for copies in every layer
    slower = PromptTimes(replace(TIMES, rates=replace(rates, prompt_miss_bytes_per_s=None)))
    assert slower.first_token_s(1000, 0.0) - missing_s == pytest.approx(2 * 4 * (MOVE_S - SIZE / 1e9))


def test_packed_experts_are_decoded_for_many_tokens_only() -> None:
    plain = ExpertPoint("bfloat16", MODEL.matrices, SIZE, 1e-3, 4e-3)
    packed = ExpertPoint("int4", MODEL.matrices, SIZE // 4, 2e-4, 6e-3)
    rates = replace(RATES, experts=(plain, packed))
    dense, few = (expert_times_s(rates, name, MODEL.matrices, SIZE, 64) for name in ("bfloat16", "int4"))
    assert dense[[0, 1, 64]] == pytest.approx([0, 1e-3, 4e-3])
    assert few[[0, 1, 64]] == pytest.approx([0, 2e-4, 6e-3])
    assert few[FEW_TOKENS] == pytest.approx(FEW_RATIO * 2e-4)
    assert few[FEW_TOKENS + 1] == pytest.approx(dense[FEW_TOKENS + 1] + 2e-3)  # decoding takes what many_s tells
    measured = replace(rates, experts=(plain, packed._replace(few_s=5e-4)))
    assert expert_times_s(measured, "int4", MODEL.matrices, SIZE, 64)[FEW_TOKENS] == pytest.approx(5e-4)


@pytest.mark.parametrize(("engine", "passes"), [(Engine.CPU, 1), (Engine.DEVICE, 2)])
def test_decoding_that_is_not_measured_goes_at_the_memorys_speed(engine: Engine, passes: int) -> None:
    rates = replace(RATES, engine=engine)
    dense, packed = (expert_times_s(rates, name, MODEL.matrices, SIZE, 64) for name in ("bfloat16", "int4"))
    assert packed[64] - dense[64] == pytest.approx(passes * 2 * WEIGHTS / 1e9)


def test_popularity_is_of_a_trace() -> None:
    experts = np.array([[[0, 1]], [[0, 2]], [[0, 1]], [[0, 3]]], np.int16)  # tokens, layers, top_k
    assert popularity_of(experts, 4).tolist() == [1.0, 0.5, 0.25, 0.25]
    trace = synthesise(SynthConfig(layers=2, experts=8, top_k=2, requests=4, prompt_tokens=4, new_tokens=8))
    found = replay_hits(trace, ("lru",)).popularity
    assert found is not None
    assert found.sum() == pytest.approx(2)
    assert (np.diff(found) <= 0).all()
    own = PromptTimes(TokenTimes(MODEL, Precision("int4", SIZE // 4), RATES), found[:4])
    assert own.first_token_s(50, 0.5) > 0
