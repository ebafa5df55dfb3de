"""`hotset simulate`: what every policy would have hit, and how far that is from the best possible."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotset.cli import simulate_options as opt
from hotset.cli.output import JsonFlag, emit, note, progress_bar, renamed
from hotset.cli.traces import load_trace, short_name
from hotset.errors import HotsetError
from hotset.files import write_beside

if TYPE_CHECKING:
    from hotset.sim import Link, Result, Sweep
    from hotset.trace import Trace


def simulate(
    traces: opt.Traces,
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

    Example: hotset simulate chat.safetensors -p lru -p blend -b 10% -b 25% --streams 4 --plot hits.png
    """
    from hotset.sim import Sweep

    sweep = Sweep(
        policies=policy,
        budgets=budget,
        scope=None if scope is None else _choice(scope, "--scope", _scopes()),
        streams=streams,
        mode=_choice(mode, "--mode", {"batch": "batch", "turns": "turns"}),
        fit=fit,
        seed=seed,
        staging=staging,
        prefill=_choice(prefill, "--prefill", _admissions()),
        link=_link(link, compute, latency, expert_share),
        prefetch=_prefetch(prefetch, link),
        driver=None if driver is None else _choice(driver, "--driver", _drivers()),
        ahead=renamed(prefetch_slots, ahead, "--ahead", "--prefetch-slots"),
    )
    if plot:
        from hotset.report import check_plot

        check_plot(plot)  # before the work, not after it
    loaded = _load(traces, expert_bytes)
    result = _run(loaded, sweep)
    _write_files(result, loaded, sweep, plot, csv)
    _show(result, as_json)


def _run(traces: dict[str, Trace], sweep: Sweep) -> Result:
    from hotset.sim import count_jobs, simulate

    with progress_bar("replaying", count_jobs(traces, sweep)) as advance:
        return simulate(traces, sweep, advance=advance)


def _load(paths: list[Path], expert_bytes: str | None) -> dict[str, Trace]:
    from hotset.shape import parse_size

    traces: dict[str, Trace] = {}
    for path in paths:
        trace, name = load_trace(path), short_name(path)
        name = str(path) if name in traces else name
        traces[name] = trace.with_expert_bytes(parse_size(expert_bytes)) if expert_bytes else trace
    return traces


def _write_files(result: Result, traces: dict[str, Trace], sweep: Sweep, plot: Path | None, csv: Path | None) -> None:
    if csv:
        from hotset.report import to_csv

        with write_beside(csv) as scratch:
            scratch.write_text(to_csv(result.rows))
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


def _show(result: Result, as_json: bool) -> None:
    if as_json:
        emit(result.as_dict(), True)
        return
    from hotset.report import comparison_tables, recommendation

    advice = recommendation(result)
    emit({}, False, *comparison_tables(result), *([advice] if advice else []))
    for text in result.notes:
        note(text)


def _link(speed: str | None, compute: str | None, latency: str, expert_share: float) -> Link | None:
    from hotset.sim.link import Link, parse_duration, parse_speed

    if speed is None and compute is None:
        return None
    if speed is None or compute is None:
        raise HotsetError("a modelled link needs both --link (as 25GB/s) and --compute (as 4ms)")
    return Link(parse_speed(speed), parse_duration(compute), parse_duration(latency), expert_share)


def _prefetch(word: str, link: str | None) -> str:
    from hotset.forecasts import parse
    from hotset.sim.prefetch import AUTO, OFF, ORACLE

    if word != OFF and link is None:
        raise HotsetError("prefetch needs a modelled link: give --link (as 25GB/s) and --compute (as 4ms)")
    if word not in (AUTO, OFF, ORACLE):
        parse(word)
    return word


def _choice(word: str, option: str, choices: dict[str, Any]) -> Any:
    if word not in choices:
        raise HotsetError(f'{option} is one of {", ".join(choices)}, not "{word}"')
    return choices[word]


def _scopes() -> dict[str, Any]:
    from hotset.cache import Scope

    return {str(scope): scope for scope in Scope}


def _admissions() -> dict[str, Any]:
    from hotset.policies import Admit

    return {admit.name.lower(): admit for admit in (Admit.FREE, Admit.ALWAYS, Admit.SCORE)}


def _drivers() -> dict[str, Any]:
    from hotset.prefetch import Driver

    return {str(driver): driver for driver in Driver}
