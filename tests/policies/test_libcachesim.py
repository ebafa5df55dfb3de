"""One expert per event is an ordinary cache: hits must equal those of libCacheSim, another's implementation."""

import numpy as np
import pytest
from event_samples import PUBLIC, one_layer

from hotset.cache import Controller, Scope, SlotPlan
from hotset.policies import parse
from hotset.trace.importers import import_trace

libcachesim = pytest.importorskip("libcachesim")

RECORD = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])

# libCacheSim's LFU forgets the count of what it evicts, and its Belady gives a slot to all that it loads.
TWINS = {"lru": "LRU", "lfu:history=off": "LFU", "belady:bypass=off": "Belady"}


def write_oracle_file(path, asked):
    """The requests in libCacheSim's oracleGeneral format: each knows when its expert is asked for again."""
    records = np.zeros(len(asked), RECORD)
    records["time"], records["id"], records["size"] = np.arange(len(asked)), asked + 1, 1
    upcoming = {}
    for i in range(len(asked) - 1, -1, -1):
        records["next"][i] = upcoming.get(asked[i], -1)
        upcoming[asked[i]] = i
    records.tofile(path)


def their_misses(path, cache, slots, requests):
    reader = libcachesim.TraceReader(str(path), trace_type=libcachesim.TraceType.ORACLE_GENERAL_TRACE)
    ratio, _ = getattr(libcachesim, cache)(slots, hashpower=16).process_trace(reader)
    return round(ratio * requests)


def our_misses(asked, experts, spec, slots, scope=Scope.LAYER):
    events = one_layer(experts, 1, [[expert] for expert in asked.tolist()])
    return int(Controller(SlotPlan(events.shape, slots, scope), parse(spec)).replay(events).misses.sum())


def uniform(rng, experts, number):
    return rng.integers(0, experts, number)


def zipf(rng, experts, number):
    probability = 1 / np.arange(1, experts + 1)
    return rng.permutation(experts)[rng.choice(experts, number, p=probability / probability.sum())]


def phases(rng, experts, number):
    """Another quarter of the experts is hot every so often."""
    parts = [zipf(rng, experts // 4, number // 8) + rng.integers(experts - experts // 4 + 1) for _ in range(8)]
    return np.concatenate(parts)


@pytest.mark.parametrize("workload", [uniform, zipf, phases])
@pytest.mark.parametrize("spec", TWINS)
def test_random_requests(spec, workload, tmp_path):
    for seed, experts in enumerate((8, 40)):
        asked = workload(np.random.default_rng(seed), experts, 2000)
        write_oracle_file(tmp_path / "requests.bin", asked)
        for slots in (1, 2, experts // 4, experts // 2, experts - 1, experts):
            expected = their_misses(tmp_path / "requests.bin", TWINS[spec], slots, len(asked))
            for scope in Scope:
                assert our_misses(asked, experts, spec, slots, scope) == expected


@pytest.mark.public_traces
@pytest.mark.skipif(not (PUBLIC / "gpt-oss-20b.npz").exists(), reason="the public traces are not beside this checkout")
@pytest.mark.parametrize("layer", [0, 11, 23])
def test_first_choices_of_a_real_model(layer, tmp_path):
    trace = import_trace(PUBLIC / "gpt-oss-20b.npz")
    asked = trace.experts[:20_000, layer, 0].astype(np.int64)
    write_oracle_file(tmp_path / "requests.bin", asked)
    for spec, cache in TWINS.items():
        for slots in (2, 8, 16):
            expected = their_misses(tmp_path / "requests.bin", cache, slots, len(asked))
            assert our_misses(asked, trace.shape.experts, spec, slots) == expected


def test_bypass_only_lowers_the_misses_of_belady(tmp_path):
    asked = zipf(np.random.default_rng(3), 20, 1000)
    write_oracle_file(tmp_path / "requests.bin", asked)
    for slots in (1, 4, 10):
        assert our_misses(asked, 20, "belady", slots) < their_misses(tmp_path / "requests.bin", "Belady", slots, 1000)
