"""What `make demo` shows: a model at a quarter of its experts at work, then what other policies would have hit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hotset.cli.interrupts import exit_code
from hotset.cli.output import aside, emit, finish_text, progress_bar, show

if TYPE_CHECKING:
    from hotset.cli.loading import Loaded
    from hotset.sim import Result
    from hotset.trace import Trace

MEMORY = "25%"
NEW_TOKENS = 96
PROMPTS = {
    "Italian": "La stampante non risponde. Prima di chiamare l'assistenza, l'utente deve",
    "C": "/* Return the number of words in a string. */\nint count_words(const char *text)\n{\n",
}


def demo() -> None:
    """Run the reference model on two prompts and replay what was routed."""
    from hotset.cli.loading import loaded_model
    from hotset.options import RunOptions

    with loaded_model(RunOptions(memory=MEMORY)) as loaded:
        aside(f"The reference model with {MEMORY} of its experts in memory:")
        trace = _run(loaded)
    aside("\nThe same routing, replayed under other policies:\n")
    result = _replay(trace)
    _show(result)


def _run(loaded: Loaded) -> Trace:
    """Answer the prompts, live, and return what was routed."""
    from hotset.cli.generate import generate
    from hotset.cli.prompts import encode_plain
    from hotset.cli.summary import summary_line
    from hotset.generation.sampling import Sampling

    with loaded.trace() as recorder:
        for name, prompt in PROMPTS.items():
            aside(f"\n--- {name}")
            show(prompt)
            loaded.model.hotset.reset_stats()
            answer = generate(loaded, encode_plain(loaded, prompt), Sampling(max_new_tokens=NEW_TOKENS), show)
            finish_text(answer.text)
            if answer.finish == "interrupt":
                sys.exit(exit_code())
            aside(summary_line(len(answer.new_ids), answer.tokens_per_s, loaded.stats()))
    found: Trace = recorder.finish(tuple({"prompt": name} for name in PROMPTS))
    return found


def _replay(trace: Trace) -> Result:
    from hotset.sim import Sweep, count_jobs, simulate

    traces, sweep = {"demo": trace}, Sweep(policies=["lru", "blend"], budgets=[MEMORY], fit=0)
    with progress_bar("replaying", count_jobs(traces, sweep)) as advance:
        return simulate(traces, sweep, advance=advance)


def _show(result: Result) -> None:
    """The table of the answers; two prompts of one pass each say little of prefill."""
    from dataclasses import replace

    from hotset.report import comparison_tables

    decode = replace(result, rows=[row for row in result.rows if row.phase == "decode"])
    emit({}, False, *comparison_tables(decode))


if __name__ == "__main__":
    from hotset.cli.ending import end_well

    sys.exit(end_well(demo))
