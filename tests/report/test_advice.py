from dataclasses import replace

from result_rows import RATES, result, row, sized, sweep

from hotset.report import recommendation
from hotset.sim import Result
from hotset.sim.rows import Times


def advice(found: Result) -> str:
    text = recommendation(found)
    assert text is not None
    return text


def test_policy_memory_and_distance() -> None:
    assert advice(result(*map(sized, sweep()))) == (
        "demo: blend does best and reaches a decode hit rate of 90 % with 50 % of the experts (384 slots, 9.49 GiB). "
        "On average over the budgets it closes 43 % of the gap from LRU and stays 7.0 points below the best possible "
        "(Belady, which knows the future)."
    )


def test_the_mean_share_of_the_time_bound() -> None:
    shares = {76: 0.6, 192: 0.7, 384: 0.95}
    rows = [replace(r, times=Times(0.1, 1.0, 1.0).with_bound(shares[r.budget_slots])) for r in sweep()]
    assert advice(result(*rows)).endswith("future). Over this link it reaches 75 % of the time bound.")
    assert "link" not in advice(result(*sweep()))


def test_a_budget_for_each_target() -> None:
    text = advice(result(*sweep(RATES | {"blend": (0.46, 0.83, 0.93)})))
    assert "80 % with 25 % of the experts (192 slots) and 90 % with 50 % of the experts (384 slots)." in text


def test_says_when_one_target_is_out_of_reach() -> None:
    text = advice(result(*sweep(RATES | {"blend": (0.46, 0.83, 0.89)})))
    assert "80 % with 25 % of the experts (192 slots); no budget of this sweep reaches 90 %" in text
    assert "the highest is 89.0 % with 50 % of the experts (384 slots)" in text


def test_says_when_no_target_is_reached() -> None:
    rates = dict.fromkeys(("lru", "blend"), (0.1, 0.2, 0.3)) | {"belady": (0.4, 0.5, 0.6)}
    text = advice(result(*sweep(rates)))
    assert "reaches a decode hit rate of 80 % with no budget of this sweep: the highest is 30.0 %" in text
    assert "90 %" not in text


def test_lru_has_no_gap_to_itself() -> None:
    text = advice(result(*sweep({"lru": (0.4, 0.7, 0.9), "belady": (0.5, 0.8, 1.0)})))
    assert text.startswith("demo: lru reaches")
    assert "10.0 points below the best possible" in text
    assert "gap" not in text


def test_says_when_nothing_is_left_to_gain() -> None:
    text = advice(result(*sweep(dict.fromkeys(("lru", "blend", "belady"), (0.9, 0.95, 1.0)))))
    assert "That is the best possible" in text


def test_small_shares_are_not_rounded_away() -> None:
    assert "0.521 % of the experts (4 slots)" in advice(result(row(budget_slots=4, hit_rate=0.95)))


def test_only_decode_from_cold_is_judged() -> None:
    loud = dict.fromkeys(("lru", "static", "belady"), (0.99, 0.99, 0.99))
    rows = [*sweep(), *sweep(loud, start="warm"), *sweep(loud, phase="prefill")]
    assert advice(result(*rows)).startswith("demo: blend does best")


def test_a_policy_that_lacks_a_budget_is_not_chosen() -> None:
    rows = [*sweep(), row(policy="lucky", budget_slots=384, budget="50%", hit_rate=0.99)]
    assert "lucky" not in advice(result(*rows))


def test_a_line_per_trace() -> None:
    lines = advice(result(*sweep(), *sweep(trace="other"))).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["demo", "other"]


def test_nothing_to_say() -> None:
    assert recommendation(Result()) is None
    assert recommendation(result(*sweep(phase="prefill"))) is None
    assert recommendation(result(*(r for r in sweep() if r.policy == "belady"))) is None


def test_without_a_bound_no_distance_is_claimed() -> None:
    rows = [replace(r, gap_closed=None) for r in sweep() if r.policy != "belady"]
    assert "best possible" not in advice(result(*rows))
