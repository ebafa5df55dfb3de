"""The next use, in plain Python: a dict here, a list there, one number after the other, as slow as it likes.

Written from the words of the study (rates, transitions, rows, recall, TD(0)) and of the module, and not from its loops.
Tokens, passes and places are looked up by name in dicts; nothing is overwritten in rings.
"""

import math
from itertools import chain

from hotset.trace import Phase

HALF_LIVES_TOKENS = (1, 3, 8, 24, 72, 240)
WEIGHTS = [0.56, -0.34, 1.04, 1.58, 0.8, -1.1, 1.12, 0.12, -1.09, -1.17, 0.26, -1.87, 0.28, -0.07, -0.13, 0.44, 0.03, -0.24]  # fmt: skip  # noqa: E501
FAR = 16
LAST_TOKENS = 64  # of a prompt, which are taken one by one


class SlowNextUse:
    """One stream per request, and what all of them share."""

    def __init__(self, shape, policy, events, admission):
        self.admission, self.events, self.length = admission, events, policy.passes
        self.shape, self.experts = shape, shape.experts
        self.depth = 8 if policy.depth == "auto" else int(policy.depth)
        number = 16 if policy.streams == "auto" else int(policy.streams)
        self.streams = [_Stream(n, shape) for n in range(number)]
        self.layers = [_SharedLayer(shape) for _ in range(shape.layers)]
        self.weights, self.energy = list(WEIGHTS), [1e-3] * len(WEIGHTS)
        self.place_of = {}  # of a signature, or of two in a row: the stream and the pass where it was last
        self.decode_passes = 0

    def observe(self, cache, event):
        """Learn from one event, then score the layer's experts anew."""
        layer = self.layers[event.layer]
        layer.count(event)
        by_stream = self._streams_of(cache.tick, self._tokens(cache.tick - 1, event.layer))
        if by_stream:
            self._begin_passes(event, by_stream)
            stay = layer.stay(cache, event)
            for number in sorted(by_stream):
                stream = self.streams[number]
                turns = stream.gap if event.phase == Phase.DECODE else 1
                rate, discount = 0.01 / math.sqrt(len(by_stream) * turns), discount_of(stay / turns)
                self._follow(event, stream, by_stream[number], discount, rate)
        self._add_up(event.layer)

    def score(self, _, __, key):
        return self.layers[key[0]].worth[key[1]]

    def _tokens(self, number, layer):
        """Request and experts of every token of an event; those that passed the layer by are left out."""
        if self.events.routed is None:
            return []
        bounds, experts, request = self.events.routed
        chosen = [(int(request[t]), [int(e) for e in experts[t, layer] if e >= 0]) for t in range(*bounds[number])]
        return [(whose, some) for whose, some in chosen if some]

    def _one_by_one(self, event):
        """How many of a stream's tokens are taken one by one, at most: of a decode step only the last."""
        return min(LAST_TOKENS, self.length) if event.phase == Phase.PREFILL else 1

    def _streams_of(self, tick, tokens):
        """The tokens of each stream; a new request takes the one that was served longest ago, unless that is busy."""
        by_stream = {}
        for request, experts in tokens:
            stream = self._stream_of(request, by_stream)
            stream.turn = tick
            by_stream.setdefault(stream.number, []).append(experts)
        return by_stream

    def _stream_of(self, request, busy):
        for stream in self.streams:
            if stream.owner == request:
                return stream
        oldest = min(self.streams, key=lambda stream: stream.turn)
        if oldest.number in busy:
            return self.streams[request % len(self.streams)]
        oldest.begin_request(request)
        return oldest

    def _begin_passes(self, event, by_stream):
        """A pass begins where a stream is at a layer that is not above the last one."""
        begin = [number for number in by_stream if event.layer <= self.streams[number].at]
        self.decode_passes += bool(begin) and event.phase == Phase.DECODE
        for number in sorted(by_stream):
            stream = self.streams[number]
            if number in begin:
                if event.phase == Phase.DECODE:
                    stream.note_turn(self.decode_passes)
                self._note_places(event, stream, by_stream[number])
            stream.at = event.layer

    def _note_places(self, event, stream, tokens):
        one_by_one = tokens[-self._one_by_one(event) :]
        stream.first = stream.passes + 1
        follows_on = event.layer not in stream.begins and len(one_by_one) == len(tokens)
        for experts in one_by_one:
            before, now = stream.signature.get(stream.passes), signature_of(experts)
            stream.passes += 1
            names = [("one", now)] + (
                [("pair", (before * 7919 + now) % 65536)] if follows_on and stream.passes > 1 else []
            )
            stream.signature[stream.passes] = now
            stream.found[stream.passes] = {name[0]: self.place_of.get(name) for name in names}
            self.place_of |= dict.fromkeys(names, (stream.number, stream.passes))
            follows_on = True

    def _follow(self, event, stream, tokens, discount, rate):
        mine, layer = stream.layers[event.layer], self.layers[event.layer]
        if event.layer in stream.begins:
            stream.begins.remove(event.layer)
            mine.begin_request(layer.lately)
        one_by_one = tokens[-self._one_by_one(event) :]
        rest = tokens[: len(tokens) - len(one_by_one)]
        if rest:
            mine.age([sum(e in some for some in rest) / len(rest) for e in range(self.experts)], len(rest))
            mine.routes, mine.to_learn_from = [], None
        for at, experts in enumerate(one_by_one, stream.first):
            self._take(event.layer, stream, experts, at, discount, rate)

    def _take(self, number, stream, experts, at, discount, rate):
        """One token of one stream."""
        layer, mine = self.layers[number], stream.layers[number]
        used = [float(e in experts) for e in range(self.experts)]
        for before in mine.routes:
            layer.followed[before] += 1
            for e in experts:
                layer.follows[before][e] += 1
        mine.age(used, 1)
        features = self._features(number, stream, experts, at)
        rows = self._rows(number, stream, experts, at)
        value = [
            sum((self.weights[f] + layer.own[f]) * features[f][e] for f in range(len(features)))
            + sum(layer.rows[row][e] for row in rows if row in layer.rows)
            for e in range(self.experts)
        ]
        if mine.to_learn_from:
            surprise = [
                (1.0 if used[e] else discount * logistic(value[e])) - logistic(mine.value[e])
                for e in range(self.experts)
            ]
            self._learn(layer, surprise, *mine.to_learn_from, rate)
        mine.value, mine.to_learn_from, mine.routes = value, (features, rows), experts
        stream.history.setdefault(at, {})[number] = experts

    def _features(self, number, stream, experts, at):
        layer, mine = self.layers[number], stream.layers[number]
        usual = [rate + 1e-3 for rate in layer.ever]
        after = [
            [(layer.follows[b][e] + 4 * usual[e]) / (layer.followed[b] + 4) for e in range(self.experts)]
            for b in experts
        ]
        roots = [[math.sqrt(rate) for rate in rates] for rates in (*mine.rates, layer.ever, layer.lately)]
        mean = [math.sqrt(sum(row[e] for row in after) / len(after)) for e in range(self.experts)]
        lift = [sum((row[e] - usual[e]) / (row[e] + usual[e]) for row in after) for e in range(self.experts)]
        found = stream.found.get(at, {})
        recalled = [self._recall(number, stream, at, found.get(kind)) for kind in ("one", "pair")]
        return [*roots, mean, lift, [1.0] * self.experts, *chain(*recalled)]

    def _recall(self, number, stream, here, place):
        """What followed where the same was met before: at once, soon, and later."""
        next_one, soon, later = ([0.0] * self.experts for _ in range(3))
        if place is not None:
            where, then = self.streams[place[0]], place[1]
            end = here - 1 if where is stream else where.passes
            ahead = range(1, min(FAR, end - then) + 1) if where.passes - then < self.length - 1 else ()
            for j in ahead:
                for e in where.history.get(then + j, {}).get(number, []):
                    if j == 1:
                        next_one[e] += 1
                    elif j <= 4:
                        soon[e] += 0.333
                    else:
                        later[e] += 0.125
        return next_one, soon, later

    def _rows(self, number, stream, experts, at):
        """Names of rows: of a layer so many above, of this layer a pass ago, of a signature."""
        before = stream.history.get(at, {})
        above = [(d, e) for d in range(1, self.depth) for e in before.get(number - d, [])]
        ago = [("ago", e) for e in stream.layers[number].routes]
        return [*((0, e) for e in experts), *above, *ago, ("signature", stream.signature[at] % 256)]

    def _learn(self, layer, surprise, features, rows, rate):
        for f, feature in enumerate(features):
            gradient = sum(s * x for s, x in zip(surprise, feature, strict=True)) / self.experts
            self.energy[f] = 0.98 * self.energy[f] + gradient**2 + 1e-12
            layer.energy[f] = 0.98 * layer.energy[f] + gradient**2 + 1e-12
            self.weights[f] += rate * gradient / math.sqrt(self.energy[f])
            layer.own[f] += rate * gradient / math.sqrt(layer.energy[f])
        for row in rows:
            step = 0.01 * (1 + 4 / (1 + layer.learnt.get(row, 0) / 8))
            layer.learnt[row] = layer.learnt.get(row, 0) + 1
            weights = layer.rows.get(row, [0.0] * self.experts)
            layer.rows[row] = [w + step * s for w, s in zip(weights, surprise, strict=True)]

    def _add_up(self, number):
        """That none of the streams that go on uses it, as if they were independent."""
        layer = self.layers[number]
        running = [stream.layers[number].value for stream in self.streams if stream.goes_on(self.decode_passes)]
        for e in range(self.experts):
            none = math.prod(1 - logistic(value[e]) for value in running)
            layer.worth[e] = -none if running else layer.lately[e] - 1


class _SharedLayer:
    """What is known of one layer over all streams."""

    def __init__(self, shape):
        self.seen, self.churn = 0, float(shape.top_k)
        self.ever, self.lately, self.worth = [0.0] * shape.experts, [0.0] * shape.experts, [-1.0] * shape.experts
        self.own, self.energy = [0.0] * len(WEIGHTS), [1e-3] * len(WEIGHTS)
        self.followed = [0] * shape.experts
        self.follows = [[0] * shape.experts for _ in range(shape.experts)]
        self.rows, self.learnt = {}, {}

    def count(self, event):
        """Rates of all time and of the last thousand tokens, the latter at least as fast as the former."""
        self.seen += event.tokens
        ever = event.tokens / self.seen
        lately = max(1 - 0.5 ** (event.tokens / 1000), ever)
        uses = dict(zip(event.experts, event.counts, strict=True))
        for e in range(len(self.ever)):
            share = uses.get(e, 0) / event.tokens
            self.ever[e] += ever * (share - self.ever[e])
            self.lately[e] += lately * (share - self.lately[e])

    def stay(self, cache, event):
        """How many passes of all a resident stays."""
        missing = sum((event.layer, e) not in cache.resident for e in event.experts)
        if event.phase == Phase.DECODE:
            self.churn += 0.02 * (missing - self.churn)
        held = sum(key[0] == event.layer for key in cache.resident)
        return max(held, 1) / max(self.churn, 1e-3)


class _Stream:
    """A request that is followed."""

    def __init__(self, number, shape):
        self.number, self.owner, self.turn = number, None, -1
        self.at, self.passes, self.first = math.inf, 0, 0
        self.last, self.gap = 0, 1.0  # the decode pass, of all, that served it last, and how many lie between two
        self.begins = set(range(shape.layers))
        self.layers = [_StreamLayer(shape.experts) for _ in range(shape.layers)]
        self.signature, self.found, self.history = {}, {}, {}  # by pass

    def begin_request(self, owner):
        self.owner, self.at, self.last, self.gap = owner, math.inf, 0, 1.0
        self.begins = set(range(len(self.layers)))

    def note_turn(self, now):
        if self.last:
            self.gap += 0.25 * (now - self.last - self.gap)
        self.last = now

    def goes_on(self, now):
        """Whether it was served lately, by how often it used to be."""
        return self.passes > 0 and now - self.last <= 1.25 * self.gap - 0.5


class _StreamLayer:
    """What a stream knows of one layer."""

    def __init__(self, experts):
        self.seen, self.rates = 0, [[0.0] * experts for _ in range(7)]
        self.value, self.routes, self.to_learn_from = [-4.0] * experts, [], None

    def begin_request(self, lately):
        self.seen, self.rates = 64, [list(lately) for _ in range(7)]
        self.routes, self.to_learn_from = [], None

    def age(self, shares, tokens):
        self.seen += tokens
        fresh = [1 - 0.5 ** (tokens / half_life) for half_life in HALF_LIVES_TOKENS] + [tokens / self.seen]
        for rates, part in zip(self.rates, fresh, strict=True):
            for e, share in enumerate(shares):
                rates[e] += part * (share - rates[e])


def signature_of(experts):
    """A number below 65536 for a set of experts: sums and products of 32 mixed bits."""
    total, product = 0, 1
    for expert in experts:
        mixed = (expert + 1) * 2654435761 % 2**32
        mixed ^= mixed >> 15
        total, product = total + mixed, product * (mixed | 1) % 2**32
    return ((total ^ (product >> 7)) * 40503 >> 4) % 65536


def discount_of(stay):
    """What a use is worth a pass later, where residents stay so many."""
    return math.sqrt(stay) / (1 + math.sqrt(stay))


def logistic(x):
    """1 / (1 + exp(-x)), with exp(-|x|) as the 256th power of 1 - |x| / 256."""
    power = (1 - min(abs(x), 24) / 256) ** 256
    small = power / (1 + power)
    return 1 - small if x > 0 else small
