"""`hotset analyze`: what the experts of a model do, as one page with figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hotset.cli import analyze_options as opt
from hotset.cli.budgets import settled
from hotset.cli.compiling import compile_missing
from hotset.cli.live import with_messages
from hotset.cli.output import JsonFlag, emit, facts_table, note, progress_bar
from hotset.cli.targets import ForceFlag, check_out
from hotset.errors import HotsetError
from hotset.generation.prompt_files import SHIPPED

if TYPE_CHECKING:
    from hotset.analysis.analyse import Analysis, Question, SaliencyGrids
    from hotset.analysis.token_text import Decode
    from hotset.options import RunOptions
    from hotset.trace import Trace


_RUNS_A_MODEL = "for running a model: give one and --prompts FILE, or leave it out"
_KNOWN_OF_A_MODEL = "for traces that do not state it, and a model does: leave it out"
_NO_USE = "of no use with --compare, which prints what it found (--json for programs): leave it out"


class Workload(NamedTuple):
    """What is analysed: a trace, what to call it, and the text of its tokens and the saliency where they are known."""

    name: str
    trace: Trace
    text_of: Decode | None = None
    saliency: SaliencyGrids | None = None


@with_messages
def analyze(
    targets: opt.Targets = None,
    prompts: opt.Prompts = None,
    out: opt.Out = None,
    data: opt.Data = True,
    label: opt.LabelKeys = None,
    tokenizer: opt.TokenizerPlace = None,
    policy: opt.Policies = None,
    budget: opt.Budgets = None,
    expert_bytes: opt.ExpertBytes = None,
    layer: opt.Layer = None,
    request: opt.Request = None,
    limit: opt.Limit = None,
    max_new_tokens: opt.MaxNewTokens = 64,
    batch: opt.Batch = 1,
    record_lookahead: opt.Lookahead = 2,
    saliency: opt.SaliencyFlag = True,
    trace: opt.TraceOut = None,
    chat: opt.UseTemplate = None,
    memory: opt.Memory = "auto",
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    experts: opt.Experts = "auto",
    trust_remote_code: opt.TrustRemoteCode = False,
    compare: opt.Compare = False,
    text: opt.Text = None,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Show what experts do: use, specialisation, co-activation, locality, tokens, and what a cache would do.

    Examples: hotset analyze chat.safetensors -o report.html

    hotset analyze ./Qwen3-30B-A3B --prompts chat.jsonl -o report.html

    hotset analyze --compare ./Qwen3-30B-A3B qwen3-pruned --text other.txt
    """
    from hotset.options import RunOptions
    from hotset.shape import parse_size

    untouched = {
        "--limit": limit is None, "--max-new-tokens": max_new_tokens == 64, "--batch": batch == 1,
        "--record-lookahead": record_lookahead == 2, "--no-saliency": saliency, "--chat": chat is not True,
        "--no-chat": chat is not False, "--memory": memory == "auto", "--device": device == "auto",
        "--dtype": dtype == "auto", "--experts": experts == "auto", "--trust-remote-code": not trust_remote_code,
    }  # fmt: skip
    if compare or text:
        _refuse_ignored(_NO_USE, {
            "--prompts": not prompts, "--out": out is None, "--no-data": data, "--label": not label,
            "--tokenizer": tokenizer is None, "--policy": not policy, "--budget": not budget, "--layer": layer is None,
            "--request": request is None, "--trace": trace is None, "--force": not force,
            "--expert-bytes": expert_bytes is None,
            **untouched, "--memory": True, "--device": True, "--trust-remote-code": True,
        })  # fmt: skip
        run = RunOptions(memory=settled(memory), device=device, trust_remote_code=trust_remote_code)
        return _compare(targets or [], compare, text or [], run, as_json)
    _check_places(out, data, trace, bool(prompts), force)
    if not prompts:
        _refuse_ignored(_RUNS_A_MODEL, untouched)
    budgets = budget and [settled(each) for each in budget]
    question = _question_of(label, policies=policy, budgets=budgets, layer=layer, request=request)
    if prompts:
        _refuse_ignored(_KNOWN_OF_A_MODEL, {"--expert-bytes": expert_bytes is None})
        from hotset.cli.analyze_model import Recording, run_model

        model, more = (targets[0], targets[1:]) if targets else (None, [])
        options = RunOptions(
            model=model, memory=settled(memory), device=device, dtype=dtype, experts=experts, force=force,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        how = Recording(limit, max_new_tokens, batch, record_lookahead, chat, trace, saliency)
        workload = run_model(options, [*prompts, *map(Path, more)], how)
    else:
        workload = _read_traces(targets or [], tokenizer)
        if expert_bytes is not None:
            sized = workload.trace.with_expert_bytes(parse_size(expert_bytes))
            workload = workload._replace(trace=sized)
    return _report(workload, question, out, data, as_json)


def _compare(targets: list[str], wanted: bool, text: list[Path], options: RunOptions, as_json: bool) -> None:
    from hotset.cli.compare import compare_models

    if not wanted or len(targets) != 2:
        raise HotsetError("--compare takes two models and a text: hotset analyze --compare MODEL OTHER --text FILE")
    compare_models(targets[0], targets[1], text, as_json, options)


def _refuse_ignored(why: str, untouched: dict[str, bool]) -> None:
    """Refuse options that would do nothing; each is given with whether it was left as it is."""
    if given := [flag for flag, left in untouched.items() if not left]:
        raise HotsetError(f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} {why}")


def _check_places(out: Path | None, data: bool, trace: Path | None, runs: bool, force: bool) -> None:
    """Refuse what cannot be written before the work."""
    from hotset.analysis.write import data_folder

    if out is not None and out.suffix.lower() not in ("", ".html", ".htm"):
        raise HotsetError(f"the report is a page of HTML: write -o {out.with_suffix('.html')} (--json prints its data)")
    check_out(out, force)
    if trace is not None and not runs:
        raise HotsetError("--trace keeps what a model routes: give a model and --prompts")
    check_out(trace, force)
    if out is None or not data:
        return
    folder = data_folder(out)
    if folder.exists() and not folder.is_dir():
        raise HotsetError(f"{folder} is a file where the data of the report would go: choose another name with -o")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise HotsetError(f"{folder} exists: choose another name with -o, or pass --force to write into it")


def _question_of(labels: list[str] | None, **caching: Any) -> Question:
    """What is asked of the workload; a policy or a budget that cannot be read is refused before the work."""
    from hotset.analysis.analyse import Question
    from hotset.analysis.caching import CacheQuestion
    from hotset.plugins import resolve
    from hotset.policies import parse
    from hotset.shape import Budget

    if caching["policies"]:
        caching["policies"] = [resolve(spec) for spec in caching["policies"]]
    question = Question(labels=labels, caching=CacheQuestion(**caching))
    for spec in question.caching.policies or ():
        parse(spec)
    for text in question.caching.budgets or ():
        Budget.parse(text)
    return question


def _read_traces(targets: list[str], tokenizer: Path | None) -> Workload:
    from hotset.analysis.analyse import join_traces
    from hotset.cli.analyze_text import text_of_traces
    from hotset.cli.traces import load_traces

    if not targets:
        raise HotsetError("nothing to analyse: name a trace, or a model with --prompts FILE")
    for target in targets:
        if _is_model(target):
            raise HotsetError(f"{target} is not a trace: to run it as a model, give it prompts with --prompts FILE")
    traces = load_traces([Path(target) for target in targets])
    name, trace = join_traces(traces)
    return Workload(name, trace, text_of_traces(targets, trace, tokenizer))


def _is_model(target: str) -> bool:
    """Whether this names a model and no trace: a folder, a GGUF file, a hub id or a known name that is no file here."""
    from hotset.generation.known_models import find

    path = Path(target)
    if not path.exists() and not target.startswith(SHIPPED) and "/" not in target and find(target) is not None:
        return True
    hub_id = target.count("/") == 1 and not path.suffix and not target.startswith((".", "/", "~"))
    return path.is_dir() or ".gguf" in target or (hub_id and not path.exists())


def _report(workload: Workload, question: Question, out: Path | None, data: bool, as_json: bool) -> None:
    from hotset._version import __version__
    from hotset.ahead import parts_of_replays
    from hotset.analysis.analyse import analyse, count_parts
    from hotset.analysis.document import to_document
    from hotset.analysis.write import write_report
    from hotset.sim.sweep import replays_of

    name, trace, text_of, saliency = workload
    compile_missing(parts_of_replays(replays_of({name: trace}, question.caching.sweep(trace)), walk=True))
    with progress_bar("analysing", count_parts(trace, question)) as advance:
        analysis = analyse(name, trace, question, text_of=text_of, saliency=saliency, advance=advance)
    written = [] if out is None else write_report(analysis, out, data=data, version=__version__)
    files = [str(path) for path in written]
    emit(to_document(analysis) | {"files": files} if as_json else {}, as_json, *([] if as_json else _views(analysis)))
    if as_json:
        return
    if out is not None:
        more = f"; {len(files) - 1} files of data in {written[1].parent}" if len(files) > 1 else ""
        emit({}, False, f"{out}: {out.stat().st_size / 1e6:.1f} MB{more}")
    for text in analysis.notes if out is None else ():
        note(text)
    if out is None:
        note("-o report.html writes the report with its figures")


def _views(analysis: Analysis) -> list[Any]:
    """The findings in short."""
    from hotset.analysis.page import lead, tiles

    return [lead(analysis), facts_table(tiles(analysis), name_width=10)]
