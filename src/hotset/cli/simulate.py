"""`hotset simulate`: what every policy would have hit, and how far that is from the best possible."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotset.cli import simulate_options as opt
from hotset.cli.budgets import settled
from hotset.cli.compiling import compile_missing
from hotset.cli.live import with_messages
from hotset.cli.output import JsonFlag, emit_result, progress_bar, renamed
from hotset.cli.targets import check_figure, check_table
from hotset.cli.traces import TraceFiles, load_traces
from hotset.errors import HotsetError

if TYPE_CHECKING:
    from hotset.sim import Link, Result, Sweep
    from hotset.trace import Trace


@with_messages
def simulate(
    traces: TraceFiles,
    policy: opt.Policies = None,
    budget: opt.Budgets = None,
    scope: opt.ScopeName = None,
    streams: opt.Streams = 1,
    mode: opt.Mode = "batch",
    fit: opt.Fit = 0.5,
    seed: opt.Seed = 0,
    staging: opt.Staging = None,
    prefill: opt.Prefill = "free",
    expert_bytes: opt.ExpertBytes = None,
    link: opt.LinkSpeed = None,
    compute: opt.Compute = None,
    latency: opt.Latency = "0us",
    expert_share: opt.ExpertShare = 0.5,
    prefetch: opt.Prefetch = "off",
    driver: opt.Driver = None,
    prefetch_slots: opt.PrefetchSlots = None,
    ahead: opt.Ahead = None,
    plot: opt.Plot = None,
    csv: opt.Csv = None,
    as_json: JsonFlag = False,
) -> None:
    """Replay traces under every policy and budget, with Belady's optimum beside them.

    The optimum evicts what is not needed for longest: it knows the future, so no
    policy hits more often.

    Example: hotset simulate chat.safetensors -p lru -p blend -b 10% -b 25% --streams 4 --plot hits.png
    """
    from hotset.ahead import parts_of_replays
    from hotset.cache import Scope
    from hotset.policies import Admit
    from hotset.prefetch import Driver
    from hotset.shape import parse_size
    from hotset.sim import Sweep, count_jobs
    from hotset.sim import simulate as replay
    from hotset.sim.sweep import replays_of

    sweep = Sweep(
        policies=policy,
        budgets=budget and [settled(each) for each in budget],
        scope=None if scope is None else _choice(scope, "--scope", Scope),
        streams=streams,
        mode=_choice(mode, "--mode", ("batch", "turns")),
        fit=fit,
        seed=seed,
        staging=staging,
        prefill=_choice(prefill, "--prefill", (Admit.FREE, Admit.ALWAYS, Admit.SCORE)),
        link=_link(link, compute, latency, expert_share),
        prefetch=_prefetch(prefetch, link),
        driver=None if driver is None else _choice(driver, "--driver", Driver),
        prefetch_slots=renamed(prefetch_slots, ahead, "--ahead", "--prefetch-slots"),
    )
    check_figure(plot)
    check_table(csv)
    loaded = load_traces(traces)
    if expert_bytes:
        loaded = {name: trace.with_expert_bytes(parse_size(expert_bytes)) for name, trace in loaded.items()}
    jobs = count_jobs(loaded, sweep)
    compile_missing(parts_of_replays(replays_of(loaded, sweep), curve=plot is not None))
    with progress_bar("replaying", jobs) as advance:
        result = replay(loaded, sweep, advance=advance)
    _write_files(result, loaded, sweep, plot, csv)
    emit_result(result, as_json, lambda: _tables(result))


def _write_files(result: Result, traces: dict[str, Trace], sweep: Sweep, plot: Path | None, csv: Path | None) -> None:
    if csv:
        from hotset.report.csv import to_csv, write_csv

        write_csv(csv, to_csv(result.rows))
    if plot:
        from hotset.report import plot_hit_rates

        curves = _curves(traces, sweep)
        plot_hit_rates(result, plot, curves, {name: trace.shape for name, trace in traces.items()})


def _curves(traces: dict[str, Trace], sweep: Sweep) -> dict[str, Any]:
    """LRU at every size, where the replay is plain LRU: no prompts, which leave the cache alone, and no floors."""
    from hotset.cache import Scope
    from hotset.sim import lru_curve
    from hotset.trace import Phase
    from hotset.trace.combine import interleave

    if "lru" not in {policy.spec for policy in sweep.asked_for()}:
        return {}
    plain = {
        name: trace
        for name, trace in traces.items()
        if not trace.count(Phase.PREFILL) and sweep.on(trace).scope is not Scope.POOL
    }
    return {n: lru_curve(interleave(t, sweep.streams, sweep.mode).events(), Scope.LAYER) for n, t in plain.items()}


def _tables(result: Result) -> list[Any]:
    from hotset.report import comparison_tables, recommendation

    return [each for each in (*comparison_tables(result), recommendation(result)) if each]


def _link(speed: str | None, compute: str | None, latency: str, expert_share: float) -> Link | None:
    from hotset.sim.link import Link, parse_duration, parse_speed

    if speed is None and compute is None:
        return None
    if speed is None or compute is None:
        raise HotsetError("a modelled link needs both --link (as 25GB/s) and --compute (as 4ms)")
    return Link(parse_speed(speed), parse_duration(compute), parse_duration(latency), expert_share)


def _prefetch(word: str, link: str | None) -> str:
    from hotset.forecasts import parse
    from hotset.plugins import resolve
    from hotset.sim.prefetch import AUTO, OFF, ORACLE

    if word != OFF and link is None:
        raise HotsetError("prefetch needs a modelled link: give --link (as 25GB/s) and --compute (as 4ms)")
    if word not in (AUTO, OFF, ORACLE):
        word = resolve(word, "forecast")
        parse(word)
    return word


def _choice(word: str, option: str, choices: Iterable[Any]) -> Any:
    """The member of an enum, or the word, that was named."""
    known = {str(getattr(each, "name", each)).lower(): each for each in choices}
    if word not in known:
        raise HotsetError(f'{option} is one of {", ".join(known)}, not "{word}"')
    return known[word]
