"""What holds for every policy, the ones still to be written included: they are found by name."""

import sys
from textwrap import dedent

import pytest
from event_samples import one_layer, workloads
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import hotset.policies
from hotset.cache import Controller, Scope, SlotPlan
from hotset.errors import PolicyError
from hotset.policies import names, parse
from hotset.testing.events import SCOPES
from hotset.testing.policy_contract import CHECKS, check_table

every_policy = pytest.mark.parametrize("name", names())


def controller_of(name, events, slots, scope=Scope.LAYER):
    return Controller(SlotPlan(events.shape, slots, scope), parse(name))


@every_policy
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_policy_keeps_the_contract(name, check):
    check(parse(name))


@every_policy
def test_slots_are_kept_on_any_workload(name):
    @settings(max_examples=examples(8, 20), deadline=None)
    @given(workload=workloads(), scope=st.sampled_from(SCOPES))
    def check(workload, scope):
        controller = controller_of(name, *workload, scope)
        controller.replay(workload[0])
        check_table(controller)

    check()


@every_policy
def test_text_of_a_policy_parses_to_it(name):
    policy = parse(name)
    assert policy.spec == name
    other = parse(f"{name}:admit=late,bypass=off" if policy.offline else f"{name}:admit=late")
    assert parse(other.spec) == other


@pytest.mark.parametrize(
    ("spec", "shortest"),
    [
        ("decay:half_life=16.0", "decay"),
        ("decay:half_life=8.0", "decay:half_life=8"),
        ("decay:half_life=0.1", "decay:half_life=0.1"),
        ("decay:half_life=auto", "decay:half_life=auto"),
        ("window:tokens=064", "window"),
        ("window:tokens=auto", "window:tokens=auto"),
        ("slru:hint=on,hint_half_life=16", "slru:hint=on"),
        ("slru:hint=on,hint_half_life=inf", "slru:hint=on,hint_half_life=inf"),
    ],
)
def test_one_policy_has_one_text(spec, shortest):
    assert parse(spec).spec == shortest
    assert parse(shortest) == parse(spec)


TOY = """
    from dataclasses import dataclass
    from typing import Any, ClassVar, NamedTuple

    import numpy as np

    from hotset.policies.base import Policy, compiled


    class State(NamedTuple):
        unused: Any


    @compiled
    def observe(state, table, ask):
        state.unused[0] += 1


    @compiled
    def score(state, table, ask, layer, expert):
        return expert


    @dataclass(frozen=True, kw_only=True)
    class Highest(Policy):
        name: ClassVar[str] = "highest"
        observe: ClassVar[Any] = staticmethod(observe)
        score: ClassVar[Any] = staticmethod(score)

        def start(self, shape):
            return State(np.zeros(1))


    POLICY = Highest
"""


def test_a_new_file_is_a_new_policy(tmp_path, monkeypatch):
    (tmp_path / "highest.py").write_text(dedent(TOY))
    monkeypatch.setattr(hotset.policies, "__path__", [*hotset.policies.__path__, str(tmp_path)])
    assert "highest" in names()
    try:
        events = one_layer(6, 1, [[5], [4], [3], [5], [0], [1], [5], [4]])
        controller = controller_of("highest", events, 2)
        # 5 and 4 sit; each candidate replaces the lowest number: 3 for 4, 0 for 3, 1 for 0, 4 for 1. 5 is hit twice.
        assert controller.replay(events).misses.tolist() == [1, 1, 1, 0, 1, 1, 0, 1]
        assert controller.residents() == [(0, 4), (0, 5)]
    finally:
        sys.modules.pop("hotset.policies.highest", None)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", 'no policy is called "nothing"; there are belady, '),
        ("lru:half_life=3", 'lru has no option "half_life"; it has admit'),
        ("lru:admit", r'lru has no option "admit"; it has admit \(write name=value\)'),
        ("decay:half_life=long", 'half_life must be a number or auto, not "long"'),
        ("decay:half_life=0", "half_life must be a positive number"),
        ("decay:half_life=nan", "half_life must be a positive number"),
        ("window:tokens=0", "tokens must be 1 to 4096"),
        ("window:tokens=1.5", 'tokens must be a number or auto, not "1.5"'),
        ("slru:protected=1.5", "protected must be a share of the slots"),
        ("slru:hint_half_life=0", "hint_half_life must be a positive number of tokens, or inf"),
        ("slru:hint=maybe", 'hint is on or off, not "maybe"'),
        ("lru:admit=never", "admit must be always, score, late or free, not 'never'"),
        ("blend:transitions=maybe", 'transitions is on, off or auto, not "maybe"'),
    ],
)
def test_a_wrong_policy_is_refused_by_name(spec, message):
    with pytest.raises(PolicyError, match=message):
        parse(spec)
