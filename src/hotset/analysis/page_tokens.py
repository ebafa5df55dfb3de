"""The section on tokens that drive experts."""

from __future__ import annotations

from hotset.analysis.driving_tokens import LEAST_OCCURRENCES, DrivenExpert, Driver, most_driven
from hotset.analysis.page_parts import Section, percent
from hotset.analysis.token_text import Decode
from hotset.report.svg import clean

_PER_LAYER, _MOST, _LETTERS = 4, 40, 24


def tokens_section(found: list[DrivenExpert], text_of: Decode | None) -> Section:
    """A few experts of each layer with their tokens."""
    section = Section("tokens", "Tokens that drive experts")
    shown = most_driven(found, _PER_LAYER, _MOST)
    if not shown:
        section.say("No token drives an expert clearly: the trace is too short, or routing does not depend on it.")
        return section
    names = "" if text_of is not None else " The trace has no text, so tokens are shown by id."
    rows = "".join(_row(each, text_of) for each in shown)
    section.parts.append(
        '<figure><h3>Experts most driven by tokens</h3><div class="wide"><table><thead><tr><th>layer</th>'
        '<th>expert</th><th class="r">used by</th><th>tokens, and how many of their occurrences choose it</th></tr>'
        f"</thead><tbody>{rows}</tbody></table></div><figcaption>"
        + clean(
            "Experts whose choice depends most on single tokens, most surprising token first; 'used by' is the share "
            f"of all tokens. Tokens that occur fewer than {LEAST_OCCURRENCES} times are left out.{names} "
            "tokens.csv has all experts."
        )
        + "</figcaption></figure>"
    )
    return section


def _row(each: DrivenExpert, text_of: Decode | None) -> str:
    tokens = "".join(_chip(driver, text_of) for driver in each.drivers)
    share = percent(each.uses / each.tokens if each.tokens else None, 0)
    return f'<tr><td>{each.layer}</td><td>{each.expert}</td><td class="r">{share}</td><td>{tokens}</td></tr>'


def _chip(driver: Driver, text_of: Decode | None) -> str:
    share = percent(driver.uses / driver.occurrences, 0)
    title = f"token {driver.token}: {driver.uses:,} of {driver.occurrences:,} occurrences"
    return (
        f'<span class="tok" title="{clean(title)}">{clean(token_name(driver.token, text_of))}<small>{share}</small>'
        "</span>"
    )


def token_name(token: int, text_of: Decode | None) -> str:
    """A token as it can be shown: with marks for what would not be seen; its id where its text is not known."""
    text = "" if text_of is None else text_of(token)
    if not text:
        return f"#{token}"
    marked = text.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍").replace(" ", "␣")
    return marked if len(marked) <= _LETTERS else marked[: _LETTERS - 1] + "…"
