"""Kernels of prefetch on the device: claim what was queued, pick what to queue, and copy until the next event."""

from __future__ import annotations

import triton
import triton.language as tl

from hotset.forecasts._learnt import MAX_TRIALS
from hotset.forecasts.gate import ALL_WEIGHT, OWN_WEIGHT, RANK_START

_MAX_TRIALS = tl.constexpr(MAX_TRIALS)
_OWN_WEIGHT, _ALL_WEIGHT, _START = tl.constexpr(OWN_WEIGHT), tl.constexpr(ALL_WEIGHT), tl.constexpr(RANK_START)
_CHUNK = tl.constexpr(32)


@triton.jit
def _blocks_below(end, program, programs: tl.constexpr):
    """How many of a program's blocks have a number below `end`."""
    return (tl.maximum(end - program, 0) + programs - 1) // programs


@triton.jit
def _arrived(progress, blocks, lanes: tl.constexpr, programs: tl.constexpr):
    """How many blocks of each queued were copied; a list's blocks are numbered from its first queued on."""
    program = tl.arange(0, programs)
    done = tl.load(progress + program)[None, :]
    first = (tl.arange(0, lanes) * blocks)[:, None]
    below = _blocks_below(tl.minimum(done, first + blocks), program[None, :], programs)
    return tl.sum(below - _blocks_below(tl.minimum(done, first), program[None, :], programs), axis=1)


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["index"])
def claim(
    index, layer, state, out, slot_of, row_of, job_queued, words_of,
    several: tl.constexpr, layers: tl.constexpr, experts: tl.constexpr, lanes: tl.constexpr, pairs: tl.constexpr,
    pair_lanes: tl.constexpr, loads: tl.constexpr, load_lanes: tl.constexpr, distances: tl.constexpr,
    per_part: tl.constexpr, queue_lanes: tl.constexpr, width: tl.constexpr, rank_lanes: tl.constexpr,
    programs: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Let the loads of an event claim what was prefetched for it, and learn from it.

    The first program does the one, the others share the rest; none reads what another writes. The copies wait for
    this, so what can be is loaded at once, before anything is stored.
    """
    part = layer % (distances + 1)
    now = tl.load(state.stop)
    valid = tl.load(state.target + part) == now
    words = tl.load(words_of + layer)
    pair, place, job = tl.arange(0, pair_lanes), tl.arange(0, queue_lanes), tl.arange(0, load_lanes)
    asked = tl.load(index + pair, mask=pair < pairs, other=-1)
    asked = tl.where((asked >= 0) & (asked < experts), asked, -1).to(tl.int32)
    queued = tl.load(state.queued_expert + part * per_part + place, mask=place < per_part, other=-1)
    queued = tl.where(valid, queued, -1)
    blocks = (words + block - 1) // block
    copied = tl.where(queued >= 0, _arrived(state.progress + part * programs, blocks, queue_lanes, programs), 0)
    loaded = job < tl.load(out.missing)
    expert = tl.where(loaded, tl.load(out.loads + 4 * job, mask=job < loads, other=-2), -2)
    same = expert[:, None] == queued[None, :]
    wanted = tl.max(same.to(tl.int32), axis=0) > 0
    if tl.program_id(0) == 0:
        slot = tl.load(out.loads + 4 * job + 1, mask=job < loads, other=-1)
        row = tl.load(state.queued_row + part * per_part + place, mask=place < per_part, other=0)
        same = same & (copied > 0)[None, :]  # what has not started is not there
        found = tl.max(tl.where(same, place[None, :], -1), axis=1)
        goes_to = tl.sum(tl.where(same, row[None, :], 0), axis=1)
        swaps = (found >= 0) & (slot >= 0)
        given = tl.load(row_of + slot, mask=swaps, other=0)
        mine = (asked[:, None] == queued[None, :]) & (copied > 0)[None, :]  # missing: it was not resident
        pair_goes_to = tl.max(tl.where(mine, row[None, :], -1), axis=1)
        tl.debug_barrier()  # no thread may still be loading what is stored here
        tl.store(job_queued + job, found, mask=loaded)
        tl.store(out.job_row + job, goes_to, mask=found >= 0)
        tl.store(row_of + slot, goes_to, mask=swaps)
        tl.store(state.prefetch_row + part * per_part + found, given, mask=swaps)
        tl.store(out.pair_row + pair, pair_goes_to, mask=pair_goes_to >= 0)  # late ones, which nothing reads yet
        tl.store(state.epoch, now + 1)
    elif tl.program_id(0) == 1:
        if tl.max(asked, axis=0) >= 0:  # an event of sentinels alone is none
            _tally(state, wanted, copied, blocks, words, block)
    elif tl.program_id(0) == 2:
        for distance in tl.static_range(distances):
            _note_residents(state, layer + 1 + distance, slot_of, distance, layers, experts, lanes)
    elif tl.max(asked, axis=0) >= 0:
        for distance in tl.static_range(distances):
            if tl.program_id(0) == 3 + distance:
                _learn(state, layer, part, now, asked, distance, distances, several, layers, width, rank_lanes)


@triton.jit
def _tally(state, wanted, copied, blocks, words, block: tl.constexpr):
    """Count what came of a part."""
    kind = tl.arange(0, 8)
    before = tl.load(state.tallies + kind, mask=kind < 6, other=0)
    what = tl.where(wanted == 0, 2, tl.where(copied == blocks, 0, 1))
    size = tl.minimum(copied.to(tl.int64) * block, words) * 8
    worth = tl.where((kind < 3)[:, None], 1, size[None, :])
    mine = (kind % 3)[:, None] == what[None, :]
    tally = tl.sum(tl.where(mine & (copied > 0)[None, :], worth, 0), axis=1)
    tl.debug_barrier()
    tl.store(state.tallies + kind, before + tally, mask=kind < 6)


@triton.jit
def _learn(
    state, layer, part, now, asked, distance: tl.constexpr, distances: tl.constexpr,
    several: tl.constexpr, layers: tl.constexpr, width: tl.constexpr, lanes: tl.constexpr,
):  # fmt: skip
    """Note of each rank whether the expert that the router put there is of the event."""
    rank = tl.arange(0, lanes)
    valid = tl.load(state.ranked_for + part * distances + distance) == now
    ranked = tl.load(state.ranked + (part * distances + distance) * width + rank, mask=rank < width, other=-1)
    own = state.own + (((distance * 2 + several) * layers + layer) * width + rank) * 2
    shared = state.shared + ((distance * 2 + several) * width + rank) * 2
    own_hits, own_trials = _cells(own, rank < width)
    hits, trials = _cells(shared, rank < width)
    tried = (ranked >= 0) & valid
    hit = tl.max((asked[:, None] == ranked[None, :]).to(tl.int32), axis=0).to(tl.float32)
    tl.debug_barrier()
    _count(own, own_hits, own_trials + 1.0, hit, tried)
    _count(shared, hits, trials + 1.0, hit, tried)


@triton.jit
def _cells(cell, mask):
    """Hits and trials."""
    return tl.load(cell, mask=mask, other=0.0), tl.load(cell + 1, mask=mask, other=0.0)


@triton.jit
def _count(cell, hits, trials, hit, tried):
    """Store hits and trials after one more; those that have grown long forget half first."""
    kept = tl.where(trials > _MAX_TRIALS, 0.5, 1.0)
    tl.store(cell, hits * kept + hit, mask=tried)
    tl.store(cell + 1, trials * kept, mask=tried)


@triton.jit
def _note_residents(
    state, layer, slot_of, distance: tl.constexpr, layers: tl.constexpr, experts: tl.constexpr, lanes: tl.constexpr
):
    """Note which experts of a layer ahead are resident: once that may be planned, its table is not safe to read."""
    expert = tl.arange(0, lanes)
    inside = (expert < experts) & (layer < layers)
    slot_of_target = tl.load(slot_of + layer * experts + expert, mask=inside, other=0)
    tl.store(state.slot_of_target + distance * experts + expert, slot_of_target, mask=expert < experts)


@triton.jit(do_not_specialize=["layer"])
def pick(
    scores, layer, state, words_of,
    count: tl.constexpr, tokens: tl.constexpr, layers: tl.constexpr, experts: tl.constexpr, lanes: tl.constexpr,
    distances: tl.constexpr, per_part: tl.constexpr, queue_lanes: tl.constexpr, width: tl.constexpr,
    rank_lanes: tl.constexpr, programs: tl.constexpr, block: tl.constexpr, min_probability: tl.constexpr,
):  # fmt: skip
    """Choose experts of the next layers to send for, from what their routers make of this one's input; one program.

    A list that was begun before, when its layer was farther off, goes on: what has started stays first, and what
    has not makes way for what is ranked now.
    """
    for distance in tl.static_range(count):
        target = layer + 1 + distance
        part = target % (distances + 1)
        number = tl.load(state.epoch) + distance
        ranked_at = state.ranked + (part * distances + distance) * width
        ranked = _rank(scores[distance], state.votes, ranked_at, tokens, experts, lanes, width, rank_lanes)
        probability = _probability(state, target, distance, tokens > 1, layers, width, rank_lanes)
        slot_of_target = tl.load(state.slot_of_target + distance * experts + ranked, mask=ranked >= 0, other=0)
        takes = (slot_of_target < 0) & (probability >= min_probability)
        blocks = (tl.load(words_of + target) + block - 1) // block
        _queue(
            state, part, target, number, ranked, probability, takes, blocks, per_part, queue_lanes, rank_lanes, programs
        )
        tl.store(state.ranked_for + part * distances + distance, number)


@triton.jit
def _queue(
    state, part, target, number, ranked, probability, takes, blocks,
    per_part: tl.constexpr, queue_lanes: tl.constexpr, rank_lanes: tl.constexpr, programs: tl.constexpr,
):  # fmt: skip
    """Put the experts that are taken into a layer's queue, the likeliest first, behind those that have started."""
    rank, place, program = tl.arange(0, rank_lanes), tl.arange(0, queue_lanes), tl.arange(0, programs)
    goes_on = tl.load(state.target + part) == number
    queued = tl.load(state.queued_expert + part * per_part + place, mask=place < per_part, other=-1)
    copied = _arrived(state.progress + part * programs, blocks, queue_lanes, programs)
    begun = goes_on & (queued >= 0) & (copied > 0)
    kept = tl.max(tl.where(begun, place + 1, 0), axis=0)  # programs start as they like: one before may have none yet
    stays = goes_on & (place < kept)
    known = tl.max(((ranked[:, None] == queued[None, :]) & stays[None, :]).to(tl.int32), axis=1)
    takes = takes & (ranked >= 0) & (known == 0)
    before = (probability[:, None] > probability[None, :]) | (
        (probability[:, None] == probability[None, :]) & (rank[:, None] < rank[None, :])
    )
    order = kept + tl.sum((before & takes[:, None]).to(tl.int32), axis=0)
    limit = tl.maximum(tl.minimum(tl.load(state.max_queued + target), per_part), kept)
    length = tl.minimum(kept + tl.sum(takes.to(tl.int32), axis=0), limit)
    takes = takes & (order < limit)
    row = tl.load(state.prefetch_row + part * per_part + order, mask=takes, other=-1)
    empty = (place >= length) & (place < per_part)
    none = tl.full((queue_lanes,), -1, tl.int32)
    tl.debug_barrier()  # no thread may still be loading what is stored here
    tl.store(state.queued_expert + part * per_part + order, ranked, mask=takes)
    tl.store(state.queued_row + part * per_part + order, row, mask=takes)
    tl.store(state.queued_expert + part * per_part + place, none, mask=empty)
    tl.store(state.queued_row + part * per_part + place, none, mask=empty)
    tl.store(state.progress + part * programs + program, program, mask=(program >= 0) & (goes_on == 0))
    tl.store(state.length + part, length)
    tl.store(state.target + part, number)


@triton.jit
def _rank(
    scores, votes, ranked_at, tokens: tl.constexpr, experts: tl.constexpr, lanes: tl.constexpr, width: tl.constexpr,
    rank_lanes: tl.constexpr,
):  # fmt: skip
    """The experts by a router's rank, best first, or -1; of several tokens those that most of them put first."""
    expert, place = tl.arange(0, lanes), tl.arange(0, rank_lanes)
    if tokens == 1:
        rank, worth = _ranks(scores, experts, lanes)
        real = worth > float("-inf")
    else:
        total = tl.zeros((lanes,), tl.float32)
        for token in range(tokens):  # not unrolled: with many experts that would take minutes to compile
            rank, worth = _ranks(scores + token * experts, experts, lanes)
            total += tl.where(worth > float("-inf"), tl.maximum(width - rank, 0), 0).to(tl.float32)
        tl.store(votes + expert, total, mask=expert < experts)
        tl.debug_barrier()
        rank, worth = _ranks(votes, experts, lanes)
        real = worth > 0
    tl.store(ranked_at + rank, tl.where(real, expert, -1), mask=(rank < width) & (expert < experts))
    tl.debug_barrier()
    return tl.load(ranked_at + place, mask=place < width, other=-1)


@triton.jit
def _ranks(values, experts: tl.constexpr, lanes: tl.constexpr):
    """How many have a higher value than each, or as high a one and a lower number; and the values."""
    expert = tl.arange(0, lanes)
    mine = tl.load(values + expert, mask=expert < experts, other=float("-inf")).to(tl.float32)
    rank = tl.zeros((lanes,), tl.int32)
    for first in range(0, lanes, _CHUNK):
        other = first + tl.arange(0, _CHUNK)
        theirs = tl.load(values + other, mask=other < experts, other=float("-inf")).to(tl.float32)
        equal = (theirs[None, :] == mine[:, None]) & (other[None, :] < expert[:, None])
        rank += tl.sum(((theirs[None, :] > mine[:, None]) | equal).to(tl.int32), axis=1)
    return rank, mine


@triton.jit
def _probability(
    state, layer, distance: tl.constexpr, several: tl.constexpr, layers: tl.constexpr, width: tl.constexpr,
    lanes: tl.constexpr,
):  # fmt: skip
    """What a queued of each rank has been worth: the layer's own record, leaning on all while it is short."""
    rank = tl.arange(0, lanes)
    inside = rank < width
    kind = distance * 2 + several
    hits, trials = _cells(state.shared + (kind * width + rank) * 2, inside)
    shared = (hits + _ALL_WEIGHT * _START) / (trials + _ALL_WEIGHT)
    hits, trials = _cells(state.own + ((kind * layers + layer) * width + rank) * 2, inside)
    return tl.where(inside, (hits + _OWN_WEIGHT * shared) / (trials + _OWN_WEIGHT), 0.0)


@triton.jit
def _is_over(stop, epoch):
    """Whether the next event has begun.

    By an atomic and not by a load: that is done by one thread, so the warps of a program never differ in what they saw.
    """
    return tl.atomic_add(stop, 0, sem="relaxed") >= epoch


@triton.jit(do_not_specialize=["layer"])
def send(
    host, rows, host_row_of, state, layer, words_of, slot_words,
    count: tl.constexpr, experts: tl.constexpr, distances: tl.constexpr, per_part: tl.constexpr,
    programs: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Copy the parts of the next layers, the nearest first, until the next event begins; says how far each came."""
    epoch = tl.load(state.epoch)
    is_over = _is_over(state.stop, epoch)
    for distance in tl.static_range(count):
        target = layer + 1 + distance
        part = target % (distances + 1)
        words = tl.load(words_of + target)
        blocks = (words + block - 1) // block
        total = tl.load(state.length + part) * blocks
        progress = state.progress + part * programs + tl.program_id(0)
        at = tl.load(progress)
        while (at < total) & (is_over == 0):
            queued = part * per_part + at // blocks
            expert = tl.load(state.queued_expert + queued)
            source = host + tl.load(host_row_of + target * experts + expert).to(tl.int64) * slot_words
            goes_to = rows + tl.load(state.queued_row + queued).to(tl.int64) * slot_words
            place = (at % blocks) * block + tl.arange(0, block)
            there = place < words
            values = tl.load(source + place, mask=there, other=0, eviction_policy="evict_first")
            is_over = _is_over(state.stop, epoch)  # asked while the bytes are on their way
            tl.store(goes_to + place, values, mask=there)
            at += programs
        tl.debug_barrier()  # all warps have loaded where to begin
        tl.store(progress, at)
