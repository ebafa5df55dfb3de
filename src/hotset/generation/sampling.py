"""How an answer is made: how many tokens there may be, and how each is chosen.

What is not asked for is decided by the model's `generation_config.json`, as its authors want it.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, replace
from typing import Any

from hotset.options.declare import Place, check_all, option

MAX_TOKENS = 2**31 - 1
MAX_SEED = 2**64 - 1
_TEXT, _HERE = "Text", Place.COMMAND | Place.FILE
_DRAWS = ("temperature", "top_p", "top_k", "min_p")
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None, "repetition_penalty": 1.0}
"""What transformers takes where neither a person nor the model's authors say anything."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; None is what the model's `generation_config.json` says."""

    max_new_tokens: int = option(
        256,
        help="The most tokens of an answer.",
        group=_TEXT,
        unit="TOKENS",
        least=1,
        most=MAX_TOKENS,
        places=_HERE,
        formerly={"new_tokens": None},
    )
    greedy: bool = option(
        False,
        help="Always take the likeliest token, whatever else is set: the same text every time.",
        group=_TEXT,
        places=_HERE,
    )
    temperature: float | None = option(
        None,
        help="Draw tokens: below 1 the likely ones more often, above 1 less; 0 is --greedy. Default: as the model "
        "wants it, by its generation_config.json; so for the next four.",
        group=_TEXT,
        least=0,
        most=1000,
        places=_HERE,
    )
    top_p: float | None = option(
        None,
        help="Draw from the smallest set of tokens with this probability together (nucleus sampling).",
        group=_TEXT,
        least=0,
        most=1,
        places=_HERE,
    )
    top_k: int | None = option(
        None, help="Draw from so many of the likeliest tokens; 0: from all.", group=_TEXT, least=0, most=MAX_TOKENS,
        places=_HERE,
    )  # fmt: skip
    min_p: float | None = option(
        None,
        help="Draw from the tokens that are at least this share as likely as the likeliest.",
        group=_TEXT,
        least=0,
        most=1,
        places=_HERE,
    )
    repetition_penalty: float | None = option(
        None,
        help="Make tokens that were there already less likely: 1 does nothing, 1.1 a little.",
        group=_TEXT,
        least=0.01,
        most=100,
        places=_HERE,
    )
    seed: int | None = option(
        None,
        help="Seed of the draw: the same seed repeats an answer; none: another one every time, named at the end.",
        group=_TEXT,
        least=0,
        most=MAX_SEED,
        places=_HERE,
    )
    system: str | None = option(
        None,
        help="A system message, put before the conversation by the model's chat template.",
        group=_TEXT,
        unit="TEXT",
        places=_HERE,
    )

    def __post_init__(self) -> None:
        check_all(self)

    @property
    def asks_to_draw(self) -> bool:
        """Whether tokens are to be drawn whatever the model's authors say."""
        return any(getattr(self, name) is not None for name in _DRAWS)

    def seeded(self) -> Sampling:
        """The same with a seed, drawn where none was given: what is said to have been used repeats an answer."""
        return self if self.seed is not None else replace(self, seed=secrets.randbelow(1 << 32))

    def within(self, authors: Any) -> SamplingUsed:
        """How tokens are chosen by a model whose `generation_config` this is."""
        penalty, by_model = self._value("repetition_penalty", authors), not self._changes()
        values = {name: self._value(name, authors) for name in _DRAWS}
        draws = self.asks_to_draw or bool(getattr(authors, "do_sample", False))
        if self.greedy or not draws or values["temperature"] == 0:  # as some authors write greedy
            return SamplingUsed(greedy=True, by_model=by_model, repetition_penalty=penalty)
        return SamplingUsed(greedy=False, by_model=by_model, repetition_penalty=penalty, seed=self.seed, **values)

    def _changes(self) -> bool:
        return self.greedy or self.asks_to_draw or self.repetition_penalty is not None

    def _value(self, name: str, authors: Any) -> Any:
        found = (getattr(self, name), getattr(authors, name, None), _NEUTRAL[name])
        value = next((each for each in found if each is not None), None)
        return float(value) if type(value) is int and name != "top_k" else value  # transformers insists on it


@dataclass(frozen=True, kw_only=True)
class SamplingUsed:
    """How the tokens of an answer were chosen, with every value that had an effect."""

    greedy: bool
    by_model: bool  # all of it as the model's generation_config.json, or transformers, has it
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def words(self, seed: int | None = None) -> str:
        """A few words for people, with what does nothing left out."""
        penalty = [] if self.repetition_penalty == 1 else [f"repetition penalty {self.repetition_penalty:g}"]
        if self.greedy:
            return ", ".join(["greedy", *penalty])
        found = [f"temperature {self.temperature:g}"]
        if self.top_p is not None and self.top_p < 1:
            found.append(f"top-p {self.top_p:g}")
        if self.top_k:
            found.append(f"top-k {self.top_k}")
        if self.min_p:
            found.append(f"min-p {self.min_p:g}")
        seed = self.seed if seed is None else seed
        return ", ".join([*found, *penalty, *([] if seed is None else [f"seed {seed}"])])
