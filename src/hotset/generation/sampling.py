"""How the next token is chosen, and how many there may be."""

from __future__ import annotations

from dataclasses import dataclass

from hotset.options.declare import Place, check_all, option

MAX_TOKENS = 2**31 - 1
_TEXT, _HERE = "Text", Place.COMMAND | Place.FILE


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Greedy unless a temperature is given; top_p is nucleus sampling."""

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
    temperature: float = option(
        0.0, help="0 takes the likeliest token; 0.7 is usual.", group=_TEXT, least=0, places=_HERE
    )
    top_p: float | None = option(
        None,
        help="Nucleus sampling: draw from the smallest set of tokens with this probability.",
        group=_TEXT,
        least=0,
        most=1,
        places=_HERE,
    )
    seed: int | None = option(None, help="Seed of the draw.", group=_TEXT, least=0, most=2**64 - 1, places=_HERE)

    def __post_init__(self) -> None:
        check_all(self)
