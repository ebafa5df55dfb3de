"""What `make demo` shows: a model at a quarter of its experts at work, then what other policies would have hit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hotset.cli.interrupts import exit_code, stop_on_signals
from hotset.cli.output import aside, emit, finish_text, progress_bar, show

if TYPE_CHECKING:
    from hotset.generation import TextModel
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

    with loaded_model(RunOptions(memory=MEMORY)) as text_model:
        aside(f"The reference model with {MEMORY} of its experts in memory:")
        trace = _run(text_model)
    aside("\nThe same routing, replayed under other policies:\n")
    result = _replay(trace)
    _show(result)


def _run(text_model: TextModel) -> Trace:
    """Answer the prompts, live, and return what was routed."""
    from hotset.cli.summary import summary_line
    from hotset.generation import Finish, Sampling, encode_plain, generate

    sampling = Sampling(max_new_tokens=NEW_TOKENS)
    with stop_on_signals() as stop, text_model.trace() as recorder:
        for name, prompt in PROMPTS.items():
            aside(f"\n--- {name}")
            show(prompt)
            text_model.handle.reset_stats()
            answer = generate(text_model, encode_plain(text_model, prompt), sampling, show, stop=stop)
            finish_text(answer.text)
            if answer.finish is Finish.INTERRUPT:
                sys.exit(exit_code())
            aside(summary_line(len(answer.new_ids), answer.tokens_per_s, text_model.stats()))
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
