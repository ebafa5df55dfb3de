"""The table of all options for the documents: `make options-page` writes docs/reference/options.md by it."""

from __future__ import annotations

from typing import Any

from hotset.generation.sampling import Sampling
from hotset.options.declare import Declared, Place, declared
from hotset.options.run import RunOptions

_HEAD = """# Options of a live model

This page is made from `hotset.options.RunOptions` and `hotset.generation.Sampling` by `make options-page`.

`hotset.load(model, **options)` and `hotset.attach(model, **options)` take the names below; `hotset run`, `hotset chat`
and `hotset trace record` take them as flags (`host_memory` is `--host-memory`); a file of options, given by
`--config FILE`, has one line for each. A `hotset.toml` in the working directory is read as well, and a line says so;
`--config /dev/null` reads none. The command line beats the file.

```toml
# hotset.toml
model = "./Qwen3-30B-A3B"
memory = "8GiB"
learn = "italian-chat"
max_new_tokens = 400
```
"""


def options_page(*kinds: Any) -> str:
    """The page of the documents."""
    return f"{_HEAD}\n{options_table(*kinds)}"


def options_table(*kinds: Any) -> str:
    """One row for each option."""
    rows = ["| option | default | what it does | where |", "|---|---|---|---|"]
    for kind in kinds or (RunOptions,):
        rows += [_row(each) for each in declared(kind)]
    return "\n".join(rows) + "\n"


def _row(each: Declared) -> str:
    default = "" if each.default is None else f"`{str(each.default).lower()}`"
    unit = f" ({each.option.unit.lower()})" if each.option.unit in ("TOKENS", "MINUTES", "SLOTS") else ""
    words = f" One of {', '.join(each.option.choices)}." if each.option.choices else ""
    return f"| `{each.name}`{unit} | {default} | {each.option.help}{words} | {_places(each.option.places)} |"


def _places(places: Place) -> str:
    if places == Place.ALL:
        return "everywhere"
    names = {Place.LOAD: "load", Place.ATTACH: "attach", Place.COMMAND: "commands", Place.FILE: "file"}
    return ", ".join(name for place, name in names.items() if place & places)


if __name__ == "__main__":
    print(options_page(RunOptions, Sampling), end="")
