"""What a policy gains over lru, by hand, and what happens when it loses."""

import pytest
from live_samples import ask, cache_of

from hotset.cache import shadow_comparison as comparison_module
from hotset.cache.shadow import take_log
from hotset.cache.shadow_comparison import ShadowComparison
from hotset.policies import parse
from hotset.shape import ModelShape
from hotset.trace import Phase

SHAPE = ModelShape(1, 6, 1)


class Bench:
    """A live cache of two slots with its comparison; `static` keeps the first two experts for good."""

    def __init__(self, policy="static", *, switch=False, slots=2):
        self.live = cache_of(SHAPE, slots, policy)
        self.said = []
        self.comparison = ShadowComparison(self.live, self.said.append, switch=switch)

    def ask(self, *experts):
        """One decode token for each expert, then a look at the log."""
        served = [ask(self.live, 0, expert) for expert in experts]
        self.comparison.take(take_log(self.live.usage, SHAPE))
        return served


@pytest.fixture
def short_window(monkeypatch):
    monkeypatch.setattr(comparison_module, "WINDOW_TOKENS", 8)


def test_a_gain_adds_up_by_hand():
    bench = Bench()
    bench.ask(0, 1, 2, 0, 1)  # static misses 0, 1 and 2; lru misses every time
    assert bench.comparison.gain(100) == {
        "policy": "static",
        "against": "lru",
        "tokens": 5,
        "hit_rate": 0.4,
        "against_hit_rate": 0.0,
        "points": 40.0,
        "recent_points": 40.0,
        "hits": 2,
        "saved_bytes": 200,
        "switches": [],
    }


def test_a_loss_adds_up_by_hand():
    bench = Bench()
    bench.ask(0, 1, 2)
    bench.ask(2, 2)  # lru has kept 2
    gain = bench.comparison.gain(100)
    assert (gain["hits"], gain["points"], gain["saved_bytes"]) == (-2, -40.0, -200)
    assert (gain["hit_rate"], gain["against_hit_rate"]) == (0.0, 0.4)


def test_what_was_read_in_the_background_is_no_saving():
    bench = Bench()
    bench.ask(0, 1, 2, 0, 1)
    assert bench.comparison.gain(100, background_bytes=150)["saved_bytes"] == 50
    assert bench.comparison.gain(100, background_bytes=500)["saved_bytes"] == -300


def test_nothing_is_gained_where_nothing_was_asked_for():
    gain = Bench().comparison.gain(100)
    assert (gain["tokens"], gain["hits"], gain["points"], gain["saved_bytes"]) == (0, 0, 0.0, 0)
    assert gain["hit_rate"] is gain["against_hit_rate"] is None


def test_prompts_are_served_in_the_shadow_but_not_counted():
    bench = Bench()
    ask(bench.live, 0, 3, 4, tokens=9, phase=Phase.PREFILL)
    bench.ask(3)
    gain = bench.comparison.gain(100)
    assert (gain["tokens"], gain["hit_rate"], gain["against_hit_rate"]) == (1, 1.0, 1.0)


def test_what_was_served_before_the_comparison_is_not_counted():
    live = cache_of(SHAPE, 2, "static")
    ask(live, 0, 0)
    ask(live, 0, 0)
    take_log(live.usage, SHAPE)
    comparison = ShadowComparison(live, print)
    ask(live, 0, 0)
    comparison.take(take_log(live.usage, SHAPE))
    assert comparison.gain(100)["hits"] == 1  # of one token, which the shadow, still empty, missed
    assert comparison.gain(100)["tokens"] == 1


def test_a_policy_that_loses_says_so_once(short_window):
    bench = Bench()
    bench.ask(0, 1, 2, 2, 2, 2, 2)
    assert bench.said == []  # seven tokens are not yet a window
    bench.ask(2)
    assert bench.said == [
        "static hit 62.5 points less than lru over the last 8 tokens: "
        "--policy lru or --policy auto would do better here"
    ]
    for _ in range(8):
        bench.ask(2, 2, 2, 2)
    assert len(bench.said) == 1
    assert bench.live.policy.spec == "static"


def test_only_the_window_is_judged(short_window):
    bench = Bench()
    for expert in (0, 1, 2, 2, 2, 2, 2, 0):  # four hits lost, and one won
        bench.ask(expert)
    assert len(bench.said) == 1
    for expert in (1, 2, 0, 1, 2, 0, 1, 2):  # lru misses throughout, static two of three times not
        bench.ask(expert)
    gain = bench.comparison.gain(1)
    assert gain["recent_points"] == 100 * 5 / 8
    assert gain["tokens"] == 16


@pytest.mark.parametrize(("lost", "told"), [(5, 0), (6, 1)])
def test_half_a_point_is_no_loss(monkeypatch, lost, told):
    monkeypatch.setattr(comparison_module, "WINDOW_TOKENS", 1000)
    bench = Bench()
    asked = [0, 1, *[2] * (lost + 1)]  # static misses 2 each time, lru the first time only; then both have 1
    asked += [1] * (1000 - len(asked))
    for at in range(0, 1000, 20):
        bench.ask(*asked[at : at + 20])
    assert bench.comparison.gain(1)["hits"] == -lost
    assert len(bench.said) == told


def test_a_loser_gives_way_and_the_live_cache_evicts_as_the_other_would(short_window):
    bench = Bench(switch=True, slots=3)
    asked = [0, 1, 2, 3, 3, 4, 4, 3, 4, 3]
    bench.ask(*asked)
    assert bench.live.policy == parse("lru")
    assert bench.comparison.shadow.policy == parse("static")
    assert bench.said == ["static hit 50.0 points less than lru over the last 10 tokens: switched to lru"]
    assert bench.comparison.switches == [{"tokens": 10, "from": "static", "to": "lru"}]
    assert bench.live.residents() == [(0, 0), (0, 1), (0, 2)]  # residents stay until another expert comes
    for expert in (5, 3, 0, 5, 1, 2, 3, 4):
        residents = [key.expert for key in bench.live.residents()]
        oldest = min(residents, key=lambda resident: max(i for i, e in enumerate(asked) if e == resident))
        served = ask(bench.live, 0, expert)
        asked.append(expert)
        if expert in residents:
            assert served.loads == ()
        else:
            assert [load.evicted for load in served.loads] == [(0, oldest)]


def test_after_the_exchange_the_shadow_does_as_the_old_policy_would(short_window):
    bench = Bench(switch=True)
    bench.ask(0, 1, 2, 2, 2, 2, 2, 2)
    shadow = bench.comparison.shadow
    assert shadow.residents() == [(0, 1), (0, 2)]
    bench.ask(3, 4, 5)
    assert shadow.residents() == [(0, 1), (0, 2)]  # static never replaces
    assert bench.live.residents() == [(0, 4), (0, 5)]


def test_without_leave_to_switch_the_policy_stays(short_window):
    bench = Bench(switch=False)
    bench.ask(0, 1, *[2] * 30)
    assert bench.live.policy.spec == "static"
    assert bench.comparison.switches == []


def test_each_change_needs_twice_the_evidence_of_the_last(short_window):
    bench = Bench(switch=True)
    for _ in range(400):  # always what the shadow has and the live cache has not
        live, shadow = (set(c.residents()) for c in (bench.live, bench.comparison.shadow))
        bench.ask(min((key.expert for key in shadow - live), default=bench.comparison._tokens_ever % 6))
    moments = [switch["tokens"] for switch in bench.comparison.switches]
    assert len(moments) >= 3
    gaps = [after - before for before, after in zip([0, *moments], moments, strict=False)]
    assert all(gap >= 8 * 2**number for number, gap in enumerate(gaps))
    specs = [bench.comparison.switches[0]["from"], *(switch["to"] for switch in bench.comparison.switches)]
    assert specs == [["static", "lru"][number % 2] for number in range(len(specs))]


def test_after_a_reset_only_what_follows_counts():
    bench = Bench()
    bench.ask(0, 1, 2, 2, 2)
    bench.comparison.reset()
    assert bench.comparison.gain(100)["tokens"] == bench.comparison.gain(100)["hits"] == 0
    bench.ask(0, 1)  # static has both; lru has 1 and 2, and gives 1 up for 0
    gain = bench.comparison.gain(100)
    assert (gain["tokens"], gain["hits"], gain["saved_bytes"]) == (2, 2, 200)
