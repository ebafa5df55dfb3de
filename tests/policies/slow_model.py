"""The contract of the cache in plain Python: sets and dicts, no cleverness, as slow as it likes.

Written from the words of the contract and not from the compiled code, so that the two can be held against each other.
An expert is a tuple (layer, expert). A score is anything that compares: the lowest is evicted.
"""
# ruff: noqa: ARG002 - all policies take the same arguments, needed or not

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from slow_nextuse import SlowNextUse

from hotset.trace import Phase

HALF_LIVES_TOKENS = (1, 3, 8, 24, 72, 240)


@dataclass
class Outcome:
    """What serving one event did."""

    hits: int
    kept: set
    staged: set
    evicted: list  # in the order of their eviction


class SlowCache:
    """Who is resident, event by event."""

    def __init__(self, shape, slots, scope, policy, prefill="free", staging=0):
        self.shape, self.slots, self.scope = shape, slots, scope
        self.swaps_at_most = staging - 1 if staging else math.inf
        self.swaps = 0  # how many of the event's own experts may still be evicted
        self.policy, self.prefill = policy, prefill
        self.resident, self.pinned = set(), set()
        self.last_use = defaultdict(int)
        self.passes = defaultdict(int)
        self.tick = 0

    def serve(self, event):
        """Serve one event as a whole."""
        self.tick += 1
        self.passes[event.layer] += 1
        asked = [(event.layer, expert) for expert in event.experts]
        for key in asked:
            self.last_use[key] = self.tick
        missing = [key for key in asked if key not in self.resident]
        self.policy.observe(self, event)
        admission = self.policy.admission if event.phase == Phase.DECODE else self.prefill
        kept, evicted = self._assign(event, asked, missing, admission)
        return Outcome(len(asked) - len(missing), kept, set(missing) - kept, evicted)

    def _assign(self, event, asked, missing, admission):
        kept, evicted = set(), []
        self.swaps = self.swaps_at_most
        by_score = sorted(sorted(missing), key=lambda key: self.score(event, key), reverse=True)
        for key in by_score:
            if self.members(event.layer) >= self.size(event.layer):
                victim = self._victim(event, key, admission)
                if victim is None:
                    break
                self.resident.remove(victim)
                evicted.append(victim)
                self.swaps -= victim in asked
            self.resident.add(key)
            kept.add(key)
        return kept, evicted

    def _victim(self, event, candidate, admission):
        """The victim that the candidate replaces, or None."""
        evictable = [key for key in self.resident if self.is_evictable(event, key, admission)]
        if admission == "free" or not evictable:
            return None
        victim = min(evictable, key=lambda key: (self.score(event, key), self.last_use[key], key))
        new, old = self.score(event, candidate), self.score(event, victim)
        refused = {"always": False, "score": new < old, "late": new <= old}[admission]
        return None if refused else victim

    def is_evictable(self, event, key, admission):
        """Pins stay, the event's own stay (unless all is decided late), and floors hold against other layers."""
        layer, expert = key
        if self.group(layer) != self.group(event.layer) or key in self.pinned:
            return False
        if layer == event.layer:
            return (admission == "late" and self.swaps > 0) or expert not in event.experts
        return sum(key[0] == layer for key in self.resident) > self.floor()

    def score(self, event, key):
        """What the policy thinks of an expert now."""
        return self.policy.score(self, event, key)

    def group(self, layer):
        """The slots that this layer may use: its own, or everybody's."""
        return layer if self.scope == "layer" else 0

    def members(self, layer):
        """How many slots of the layer's group are taken."""
        return sum(self.group(key[0]) == self.group(layer) for key in self.resident)

    def size(self, layer):
        """How many slots the layer's group has."""
        slots = min(self.slots, self.shape.total_experts)
        if self.scope == "pool":
            return slots
        return slots // self.shape.layers + (layer < slots % self.shape.layers)

    def floor(self):
        """The residents of a layer that no other layer can take away."""
        floor = self.shape.top_k + 1
        fits = self.shape.layers * floor <= min(self.slots, self.shape.total_experts)
        return floor if fits and self.policy.admission != "late" else 0


@dataclass
class SlowPolicy:
    """Counts and times that several policies share."""

    admission: str = "always"
    uses: dict = field(default_factory=lambda: defaultdict(int))
    last_pass: dict = field(default_factory=lambda: defaultdict(int))

    def observe(self, cache, event):
        """Count tokens, and note the time in passes of the layer."""
        for expert, count in zip(event.experts, event.counts, strict=True):
            self.uses[event.layer, expert] += count
            self.last_pass[event.layer, expert] = cache.passes[event.layer]

    def age_passes(self, cache, key):
        """Passes of its layer since the last use."""
        return cache.passes[key[0]] - self.last_pass[key]


class SlowLru(SlowPolicy):
    def score(self, cache, event, key):
        return cache.last_use[key]


class SlowLfu(SlowPolicy):
    def score(self, cache, event, key):
        return self.uses[key]


class SlowLfuForgets(SlowLfu):
    """Counts do not survive eviction."""

    def observe(self, cache, event):
        for expert in event.experts:
            if (event.layer, expert) not in cache.resident:
                self.uses[event.layer, expert] = 0
        super().observe(cache, event)


class SlowLfru(SlowPolicy):
    def score(self, cache, event, key):
        return self.uses[key] / (self.age_passes(cache, key) + 1)


@dataclass
class SlowClassLru(SlowPolicy):
    """Every use with its token of the layer; a class is looked up by its bounds."""

    tokens: dict = field(default_factory=lambda: defaultdict(int))
    history: dict = field(default_factory=lambda: defaultdict(list))

    def observe(self, cache, event):
        self.tokens[event.layer] += event.tokens
        for expert, count in zip(event.experts, event.counts, strict=True):
            self.history[event.layer, expert].append((self.tokens[event.layer], count))

    def score(self, cache, event, key):
        uses = self.history[key]
        last = uses[-1][0] if uses else 0
        decayed = sum(count * 0.5 ** ((last - then) / 128) for then, count in uses)
        width = max([2**number for number in range(8) if 2**number <= decayed], default=1)
        return -(self.tokens[key[0]] - last) / width


class SlowLayered(SlowPolicy):
    def score(self, cache, event, key):
        layers = cache.shape.layers
        turns = (key[0] - event.layer - 1) % layers
        return -self.age_passes(cache, key) - turns / layers


@dataclass
class SlowDecay(SlowPolicy):
    """Every use is remembered with its pass, and all are weighed afresh each time."""

    half_life_passes: float = 16.0
    history: dict = field(default_factory=lambda: defaultdict(list))

    def observe(self, cache, event):
        for expert, count in zip(event.experts, event.counts, strict=True):
            self.history[event.layer, expert].append((cache.passes[event.layer], count))

    def decayed(self, cache, event, key):
        """The uses of an expert, each at half its weight per half-life of passes."""
        now = cache.passes[key[0]]
        return sum(count * 0.5 ** ((now - then) / self.half_life_passes) for then, count in self.history[key])

    def score(self, cache, event, key):
        total = self.decayed(cache, event, key)
        return math.log2(total) if total > 0 else -math.inf


@dataclass
class SlowWindow(SlowPolicy):
    """The passes inside the window, as a list per layer."""

    tokens: int = 64
    held: dict = field(default_factory=lambda: defaultdict(list))

    def observe(self, cache, event):
        held = self.held[event.layer]
        share = Fraction(min(event.tokens, self.tokens), event.tokens)
        uses = {e: n * share for e, n in zip(event.experts, event.counts, strict=True)}
        new_tokens = min(event.tokens, self.tokens)
        while held and sum(tokens for tokens, _ in held) + new_tokens > self.tokens:
            held.pop(0)
        held.append((new_tokens, uses))

    def score(self, cache, event, key):
        return sum(uses.get(key[1], 0) for _, uses in self.held[key[0]])


class SlowAuto(SlowPolicy):
    """Several policies learn side by side; the least surprised one is asked, the first of equals."""

    def __init__(self, admission, candidates, count_of):
        super().__init__(admission)
        self.candidates, self.count_of = candidates, count_of
        self.surprise_bits = [0.0] * len(candidates)

    def observe(self, cache, event):
        if event.phase == Phase.DECODE:
            fresh = 1 / (150 * cache.shape.layers)
            for i, candidate in enumerate(self.candidates):
                bits = self._bits_per_use(cache, event, candidate)
                self.surprise_bits[i] += fresh * (bits - self.surprise_bits[i])
        for candidate in self.candidates:
            candidate.observe(cache, event)

    def _bits_per_use(self, cache, event, candidate):
        """The code length of the event's experts by their share of the counts, each with 0.03 uses extra."""
        keys = [(event.layer, expert) for expert in range(cache.shape.experts)]
        counts = [float(self.count_of(candidate, cache, event, key)) + 0.03 for key in keys]
        return -sum(math.log2(counts[expert] / sum(counts)) for expert in event.experts) / len(event.experts)

    def is_undecided(self):
        """Whether the two least surprised are as good as equal."""
        first, second = sorted(self.surprise_bits)[:2]
        return second - first < 1e-9

    def score(self, cache, event, key):
        best = min(range(len(self.candidates)), key=lambda i: self.surprise_bits[i])
        return self.candidates[best].score(cache, event, key)


def slow_decay(policy, admission):
    """One half-life, or sixteen passes and seven others to choose from."""
    if policy.half_life != "auto":
        return SlowDecay(admission, half_life_passes=float(policy.half_life))
    candidates = [SlowDecay(half_life_passes=passes) for passes in (16, 2, 4, 8, 32, 64, 128, 256)]
    return SlowAuto(admission, candidates, SlowDecay.decayed)


def slow_window(policy, admission):
    """One window, or 64 tokens and five others to choose from."""
    if policy.tokens != "auto":
        return SlowWindow(admission, tokens=int(policy.tokens))
    candidates = [SlowWindow(tokens=tokens) for tokens in (64, 16, 32, 128, 256, 512)]
    return SlowAuto(admission, candidates, SlowWindow.score)


@dataclass
class SlowSlru(SlowPolicy):
    """Two segments; `since` is the time of entry, or of the last use in there."""

    share: float = 0.75
    hint: SlowDecay | None = None
    since: dict = field(default_factory=lambda: defaultdict(int))
    protected: set = field(default_factory=set)

    def observe(self, cache, event):
        if self.hint:
            self.hint.observe(cache, event)
        for expert in event.experts:
            key = (event.layer, expert)
            self.since[key] = cache.tick
            if key in cache.resident:
                self.protected.add(key)
            else:
                self.protected.discard(key)
        self._demote(cache, event.layer)

    def _demote(self, cache, layer):
        group = cache.group(layer)
        held = {k for k in self.protected if k in cache.resident and cache.group(k[0]) == group}
        while len(held) > int(self.share * cache.size(layer)):
            oldest = min(held, key=lambda key: (self.since[key], self.tie(key)))
            held.remove(oldest)
            self.protected.remove(oldest)
            self.since[oldest] = cache.tick

    def tie(self, key):
        """Who goes first of those that became protected by the same event."""
        return key

    def score(self, cache, event, key):
        if key in self.protected:
            return (1, self.since[key])
        return (0, self.hint.score(cache, event, key) if self.hint else self.since[key])


@dataclass
class SlowBelady(SlowPolicy):
    """Looks the future up, event by event."""

    events: list = field(default_factory=list)

    def score(self, cache, event, key):
        for number in range(cache.tick, len(self.events)):  # the running event is number tick - 1
            later = self.events[number]
            if later.layer == key[0] and key[1] in later.experts:
                return -number
        return -math.inf


class SlowRequest:
    """A request that may go on: its matrix as {phase: {(layer, expert): tokens}}, and when its passes began."""

    def __init__(self, number):
        self.number, self.counts = number, {phase: Counter() for phase in Phase}
        self.begun, self.seen, self.layer, self.phase = [], 0, -1, Phase.PREFILL
        self.stored = None  # its matrix among the past ones, as of when it was put there


class SlowEam(SlowPolicy):
    """The words of the paper and of the module: requests are matrices of token counts, and some of them take turns."""

    most_running = 16

    def __init__(self, admission, policy, requests):
        super().__init__(admission)
        self.options, self.requests = policy, requests
        self.past, self.running, self.mine = [], [], None

    def observe(self, cache, event):
        self.mine = self._whose(int(self.requests[cache.tick - 1]), event.phase)
        if not self.mine.begun or event.layer <= self.mine.layer:
            self.mine.begun.append(cache.tick)
        self.mine.seen, self.mine.layer, self.mine.phase = cache.tick, event.layer, event.phase
        for other in sorted(self.running, key=lambda one: one.seen):
            if any(sum(begun > other.seen for begun in one.begun) >= 2 for one in self.running):
                self._end(other)
        for expert, count in zip(event.experts, event.counts, strict=True):
            self.mine.counts[event.phase][event.layer, expert] += count

    def _whose(self, number, phase):
        """The running request of this number, or a new one; what ran alone until then is kept as it is by now."""
        for one in [one for one in self.running if one.number == number]:
            if phase >= one.phase:
                return one
            self._end(one)
        if len(self.running) == 1 and len(self.running[0].begun) > 1:
            self._keep(self.running[0])
        if len(self.running) == self.most_running:
            self._end(min(self.running, key=lambda one: one.seen))
        self.running.append(SlowRequest(number))
        return self.running[-1]

    def _end(self, one):
        self._keep(one)
        self.running = [other for other in self.running if other is not one]

    def _keep(self, one):
        """Store a request in its own place if it still has one, else in that of the one most like it if there is none.

        What has not changed since it was stored is not stored again, not even if it has made way since.
        """
        if one.stored == one.counts:
            return
        matrix = {phase: Counter(counts) for phase, counts in one.counts.items()}
        places = [i for i, past in enumerate(self.past) if past is one.stored]
        if not places and len(self.past) < self.options.capacity:
            self.past.append(matrix)
        else:
            places = places or [max(range(len(self.past)), key=lambda i: likeness(matrix, self.past[i]))]
            self.past[places[0]] = matrix
        one.stored = matrix

    def nearest(self, phase):
        """The past requests with the largest cosine over the layers that ran by now, among those with any at all."""
        mine = self.mine.counts[phase]
        layers = {layer for layer, _ in mine}
        ranked = []
        for past in self.past:
            theirs = {key: count for key, count in past[phase].items() if key[0] in layers}
            dot = product_of(mine, theirs)
            if dot and past is not self.mine.stored:
                ranked.append((-Fraction(dot * dot, product_of(theirs, theirs)), past))
        return [past for _, past in sorted(ranked, key=lambda pair: pair[0])][: self.options.nearest]

    def score(self, cache, event, key):
        layer, _ = key
        found = self.nearest(event.phase) or [self.mine.counts]
        summed = sum((Counter(past[event.phase]) for past in found), Counter())
        total = sum(count for (row, _), count in summed.items() if row == layer)
        share = summed[key] / total if total else 0.0
        return (share + self.options.eps) * (1 - layer / cache.shape.layers)


def product_of(some, other):
    """The dot product of two sparse matrices."""
    return sum(count * other.get(key, 0) for key, count in some.items())


def likeness(some, other):
    """The cosines of both phases, added up."""
    return sum(cosine(some[phase], other[phase]) for phase in Phase)


def cosine(some, other):
    """How alike two sparse matrices are; nothing is like an empty one."""
    size = product_of(some, some) * product_of(other, other)
    return product_of(some, other) / math.sqrt(size) if size else 0.0


class SlowBlend(SlowPolicy):
    """The formulas of the module, one layer at a time, in float64."""

    def __init__(self, shape, *, transitions, admission="score"):
        super().__init__(admission)
        self.transitions, self.experts = transitions, shape.experts
        self.shared = np.array([1.0] * 7 + [0.0, 0.0, -4.0])
        self.shared_energy = np.full(10, 1e-3)
        self.layers = [_BlendLayer(shape.experts, shape.top_k) for _ in range(shape.layers)]

    def observe(self, cache, event):
        layer = self.layers[event.layer]
        used = np.zeros(self.experts)
        if event.phase == Phase.DECODE:
            used[list(event.experts)] = 1.0
            if layer.seen_tokens > 0:
                self._learn(layer, used)
            layer.age(used, 1)
            if self.transitions:
                layer.follow(event.experts)
        else:
            used[list(event.experts)] = np.array(event.counts) / event.tokens
            layer.age(used, event.tokens)
            layer.previous = ()
        if event.phase == Phase.DECODE:
            missing = sum((event.layer, expert) not in cache.resident for expert in event.experts)
            layer.churn += 0.02 * (missing - layer.churn)
        held = sum(key[0] == event.layer for key in cache.resident)
        layer.look_ahead(self.shared, 10 / (10 + held / max(layer.churn, 1e-3)))

    def _learn(self, layer, used):
        surprise = used - logistic(layer.value)
        gradient = layer.features @ surprise / self.experts
        self.shared_energy = 0.98 * self.shared_energy + gradient**2 + 1e-12
        layer.energy = 0.98 * layer.energy + gradient**2 + 1e-12
        self.shared += 0.05 * gradient / np.sqrt(self.shared_energy)
        layer.own += 0.05 * gradient / np.sqrt(layer.energy)

    def score(self, cache, event, key):
        return self.layers[key[0]].worth[key[1]]


class _BlendLayer:
    """What blend knows of one layer."""

    def __init__(self, experts, top_k):
        self.seen_tokens = 0
        self.churn = float(top_k)
        self.rates = np.zeros((7, experts))
        self.features = np.zeros((10, experts))
        self.features[9] = 1.0
        self.value = self.worth = np.full(experts, -4.0)
        self.own, self.energy = np.zeros(10), np.full(10, 1e-3)
        self.follows, self.followed = np.zeros((experts, experts)), np.zeros(experts)
        self.previous = ()

    def age(self, used, tokens):
        self.seen_tokens += tokens
        fresh = [1 - 0.5 ** (tokens / half_life) for half_life in HALF_LIVES_TOKENS]
        fresh.append(tokens / self.seen_tokens)
        self.rates += np.array(fresh)[:, None] * (used - self.rates)

    def follow(self, experts):
        for before in self.previous:
            self.followed[before] += 1
            self.follows[before, list(experts)] += 1
        self.previous = experts

    def look_ahead(self, shared, discount):
        self.features[:7] = np.sqrt(self.rates)
        self.features[7:9] = 0.0
        if self.previous:
            usual = self.rates[6] + 1e-3
            rows = list(self.previous)
            probability = (self.follows[rows] + 4 * usual) / (self.followed[rows] + 4)[:, None]
            self.features[7] = np.sqrt(probability.mean(axis=0))
            self.features[8] = ((probability - usual) / (probability + usual)).sum(axis=0)
        # One feature after the other, so that experts with the same past get the same bits and ties stay ties.
        weights = shared + self.own
        steady = weights[9] + sum(weight * row for weight, row in zip(weights[:7], self.features[:7], strict=True))
        passing = weights[7] * self.features[7] + weights[8] * self.features[8]
        self.value, self.worth = steady + passing, steady + discount * passing


def logistic(x):
    """1 / (1 + exp(-x)), with exp(-|x|) as the 256th power of 1 - |x| / 256."""
    power = (1 - np.minimum(np.abs(x), 24) / 256) ** 256
    small = power / (1 + power)
    return np.where(x > 0, 1 - small, small)


def slow_policy(policy, shape, events):
    """The slow twin of a policy of hotset."""
    admission = policy.admission.name.lower()
    plain = {"lru": SlowLru, "class_lru": SlowClassLru, "lfru": SlowLfru, "layered": SlowLayered, "static": SlowLfu}
    if policy.name in plain:
        return plain[policy.name](admission)
    if policy.name == "lfu":
        return SlowLfu(admission) if policy.history else SlowLfuForgets(admission)
    if policy.name == "decay":
        return slow_decay(policy, admission)
    if policy.name == "window":
        return slow_window(policy, admission)
    if policy.name == "slru":
        hint = SlowDecay(half_life_passes=policy.hint_half_life) if policy.hint else None
        return SlowSlru(admission, share=policy.protected, hint=hint)
    if policy.name == "belady":
        return SlowBelady("late" if policy.bypass else admission, events=list(events))
    if policy.name == "nextuse":
        return SlowNextUse(shape, policy, events, admission)
    if policy.name == "eam":
        return SlowEam(admission, policy, events.request)
    if policy.name == "blend":
        return SlowBlend(shape, transitions=policy.transitions != "off", admission=admission)
    raise LookupError(f"{policy.name} has no slow twin yet: write one beside the others")
