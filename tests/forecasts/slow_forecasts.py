"""The counting forecasts once more, from their descriptions, in plain Python with dictionaries and lists."""

# ruff: noqa: ARG002 - every model's methods take the same arguments
from __future__ import annotations

from collections import defaultdict
from typing import Any

from hotset.forecasts import Seen
from hotset.shape import ModelShape


class Slow:
    """What all have: the mean rate of use per layer, of up to 4096 tokens, and halved counts."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.rate = [[shape.top_k / shape.experts] * shape.experts for _ in range(shape.layers)]
        self.tokens = [8.0] * shape.layers
        self.cells: dict[Any, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def observe(self, event: Seen) -> None:
        used = dict(zip(event.experts.tolist(), event.counts.tolist(), strict=True))
        self.learn(event, used)
        self.tokens[event.layer] = min(self.tokens[event.layer] + event.tokens, 4096)
        fresh = min(event.tokens / self.tokens[event.layer], 1)
        row = self.rate[event.layer]
        self.rate[event.layer] = [(1 - fresh) * r + fresh * used.get(e, 0) / event.tokens for e, r in enumerate(row)]
        self.remember(event, used)

    def learn(self, event: Seen, used: dict[int, int]) -> None:
        raise NotImplementedError

    def remember(self, event: Seen, used: dict[int, int]) -> None:
        raise NotImplementedError

    def one(self, event: Seen, target: int, distance: int) -> list[float]:
        """The probabilities of one token."""
        raise NotImplementedError

    def probabilities(self, event: Seen, distance: int) -> list[float]:
        target = (event.layer + distance) % self.shape.layers
        one = [min(max(p, 0.0), 1.0) for p in self.one(event, target, distance)]
        return [1 - (1 - p) ** self.tokens_of(event, target) for p in one]

    def tokens_of(self, event: Seen, target: int) -> int:
        return 1 if target <= event.layer and event.phase == 0 else event.tokens

    def tally(self, key: Any, hits: float, trials: float) -> None:
        cell = self.cells[key]
        cell[1] += trials
        if cell[1] > 8192:
            cell[0], cell[1] = cell[0] / 2, cell[1] / 2
        cell[0] += hits

    def share(self, key: Any, prior: float, weight: float) -> float:
        hits, trials = self.cells[key]
        return (hits + weight * prior) / (trials + weight)


class SlowPrevious(Slow):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.clock = [0] * shape.layers
        self.last: dict[tuple[int, int], int] = {}

    def bucket(self, layer: int, expert: int) -> int:
        if (layer, expert) not in self.last:
            return 7
        age = self.clock[layer] - self.last[layer, expert] + 1
        return next((i for i, limit in enumerate((1, 2, 3, 5, 8, 16, 32)) if age <= limit), 7)

    def learn(self, event: Seen, used: dict[int, int]) -> None:
        if event.phase == 1:
            for e in range(self.shape.experts):
                self.tally((event.layer, self.bucket(event.layer, e)), used.get(e, 0), event.tokens)

    def remember(self, event: Seen, used: dict[int, int]) -> None:
        self.clock[event.layer] += event.tokens
        for e, uses in used.items():
            self.last[event.layer, e] = self.clock[event.layer] - event.tokens // (uses + 1)

    def one(self, event: Seen, target: int, distance: int) -> list[float]:
        even = sum(self.rate[target]) / self.shape.experts
        return [
            self.share((target, self.bucket(target, e)), even, 8) + 1e-4 * self.rate[target][e]
            for e in range(self.shape.experts)
        ]


class SlowTransition(Slow):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.trail: list[tuple[int, list[int]]] = []
        self.pairs: dict[Any, float] = defaultdict(float)
        self.sources: dict[Any, float] = defaultdict(float)

    def learn(self, event: Seen, used: dict[int, int]) -> None:
        for distance, (layer, experts) in enumerate(self.trail, 1):
            if event.tokens == 1 and layer == (event.layer - distance) % self.shape.layers:
                for before in experts:
                    self.sources[distance, event.layer, before] += 1
                    for e in used:
                        self.pairs[distance, event.layer, before, e] += 1

    def remember(self, event: Seen, used: dict[int, int]) -> None:
        self.trail = [(event.layer, list(used) if event.tokens == 1 else []), *self.trail][:3]

    def one(self, event: Seen, target: int, distance: int) -> list[float]:
        found = [0.0] * self.shape.experts
        for before, uses in zip(event.experts.tolist(), event.counts.tolist(), strict=True):
            for e in range(self.shape.experts):
                row = self.pairs[distance, target, before, e] + 4 * self.rate[target][e]
                found[e] += uses / event.counts.sum() * row / (self.sources[distance, target, before] + 4)
        return found


class SlowToken(Slow):
    slots = 8192

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.places: dict[int, tuple[int, dict[int, list[list[int]]]]] = {}

    def history(self, token: int, layer: int) -> list[list[int]]:
        owner, past = self.places.get(token % self.slots, (-1, {}))
        return past.get(layer, [])[-4:] if owner == token else []

    def learn(self, event: Seen, used: dict[int, int]) -> None:
        past = self.history(event.token, event.layer) if event.token >= 0 and event.tokens == 1 else []
        for e in range(self.shape.experts if past else 0):
            votes = sum(e in one for one in past)
            trial = 1.0 if votes else self.rate[event.layer][e]
            self.tally((event.layer, len(past), votes), e in used, trial)

    def remember(self, event: Seen, used: dict[int, int]) -> None:
        if event.token >= 0 and event.tokens == 1:
            place = event.token % self.slots
            if self.places.get(place, (-1, {}))[0] != event.token:
                self.places[place] = (event.token, defaultdict(list))
            self.places[place][1][event.layer].append(list(used))

    def one(self, event: Seen, target: int, distance: int) -> list[float]:
        rate = self.rate[target]
        past = self.history(event.token, target) if target > event.layer and event.tokens == 1 else []
        if event.token < 0 or not past:
            return rate
        votes = [sum(e in one for one in past) for e in range(self.shape.experts)]
        shares = [self.share((target, len(past), v), 0.2 + 0.5 * v / len(past) if v else 0.7, 8) for v in votes]
        return [p if v else min(p * r, 1.0) for p, v, r in zip(shares, votes, rate, strict=True)]


class SlowGate(Slow):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.pending: dict[tuple[int, int], tuple[bool, list[int]]] = {}

    def learn(self, event: Seen, used: dict[int, int]) -> None:
        for distance in (1, 2, 3):
            several, predictions = self.pending.pop((distance, event.layer), (False, []))
            for e in range(self.shape.experts if predictions else 0):
                rank = predictions.index(e) if e in predictions else "rest"
                trial = 1.0 if e in predictions else 1 - (1 - self.rate[event.layer][e]) ** event.tokens
                self.tally((several, distance, rank), e in used, trial)
                self.tally((several, distance, rank, event.layer), e in used, trial)

    def remember(self, event: Seen, used: dict[int, int]) -> None:
        for d in range(3):
            row = event.predictions[d].tolist() if d < len(event.predictions) else []
            target = (event.layer + d + 1) % self.shape.layers
            self.pending[d + 1, target] = (event.tokens > 1, list(dict.fromkeys(e for e in row if e >= 0)))

    def probabilities(self, event: Seen, distance: int) -> list[float]:
        target = (event.layer + distance) % self.shape.layers
        base = [1 - (1 - r) ** self.tokens_of(event, target) for r in self.rate[target]]
        several, predictions = self.pending.get((distance, target), (False, []))
        if not predictions:
            return base
        found = []
        for e in range(self.shape.experts):
            rank = predictions.index(e) if e in predictions else "rest"
            shared = self.share((several, distance, rank), 0.5 if e in predictions else 0.4, 8)
            own = self.share((several, distance, rank, target), shared, 24)
            found.append(own if e in predictions else min(own * base[e], 1.0))
        return found


SLOW = {"previous": SlowPrevious, "transition": SlowTransition, "token": SlowToken, "gate": SlowGate}
