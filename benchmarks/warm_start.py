"""What a profile brings to the first tokens: hit rates by replay on two models, and time to the first token live.

A profile is made of one half of a workload's requests (counts, and what blend learnt) and judged on the other half, in
many orders. It can be the workload's own, one merged of all workloads, or that of another workload (wrong).

python benchmarks/warm_start.py --model DIR      DIR as made by hotset.reference.inflate(5632, DIR), packed or not;
                                                 without it only the replays run, and the live part is kept as it was
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotset import reference
from hotset.cache import Controller, SlotPlan
from hotset.cache.learning import PRIOR_TOKENS, learnt, prime
from hotset.policies import parse
from hotset.policies.belady import Belady
from hotset.profile import Fingerprint, Profile
from hotset.profile.combine import merge
from hotset.profile.fold import profile_of
from hotset.shape import ModelShape
from hotset.trace import Phase, Trace
from hotset.trace.events import EventTable

from common import RESULTS, gpt_oss, publish

SHARES = (0.125, 0.25, 0.5)
POLICIES = ("blend", "nextuse", "lru")
PRIORS = (0, 16, 32, 64, 128, 256, 1024)
ORDERS, WRONGS = 12, 5
FIRST, LATER = 64, 256
MEASURES = (
    "decode_64", "decode_256", "session_64", "session_64_by_token", "first_prompt", "first_prompt_by_token",
)  # fmt: skip
STARTS = ("cold", "own", "merged", "wrong")
AIM_POINTS = 20.0
MARK = Fingerprint("benchmark", "")

LIVE_TOKENS, PROFILE_TOKENS, PAUSE_S = 64, 16, 2.0
OWN, WRONG = "it", "python"
RUNS = (("cold", 0.0), ("own", 0.0), ("wrong", 0.0), ("own", PAUSE_S), ("wrong", PAUSE_S))

Rates = npt.NDArray[np.float64]  # [measures], percent


@dataclass(frozen=True)
class Session:
    """The requests of one order up to the last token that is judged, and which events each measure counts."""

    events: EventTable
    masks: dict[str, npt.NDArray[np.bool_]]


@dataclass(frozen=True)
class Workload:
    """One workload of a model: what a profile is made of, and what judges it."""

    name: str
    fit: Trace
    sessions: list[Session]


def reference_workloads() -> list[Workload]:
    """The domains of the reference model."""
    return [workload(name, reference.trace(name)) for name in reference.DOMAINS]


def gpt_oss_workloads() -> list[Workload]:
    """The public trace by family of data sets, as far as a family has enough requests."""
    trace = gpt_oss()
    if trace is None:
        return []
    families = [_family(label["dataset"]) for label in trace.labels]
    wanted = [name for name in dict.fromkeys(families) if families.count(name) >= 2 * ORDERS]
    return [workload(name, trace.select([i for i, f in enumerate(families) if f == name])) for name in wanted]


def _family(dataset: str) -> str:
    return next((name for name in ("mmlu_pro", "mmlu", "gpqa", "sorry_bench") if dataset.startswith(name)), dataset)


def workload(name: str, trace: Trace) -> Workload:
    """Split a workload into requests to learn from and others to judge by."""
    fit, judged = trace.split(0.5, 0)
    random = np.random.default_rng(1)
    return Workload(name, fit, [session(judged, random.permutation(judged.requests)) for _ in range(ORDERS)])


def session(judged: Trace, order: npt.NDArray[Any]) -> Session:
    """The requests one after the other in this order, as many as the longest measure needs."""
    rows = np.concatenate([np.flatnonzero(judged.request == request) for request in order])
    decoded = np.cumsum(judged.phase[rows] == Phase.DECODE)
    events = judged.take(rows[: int(np.searchsorted(decoded, LATER)) + 1]).events()
    return Session(events, masks(events))


def masks(events: EventTable) -> dict[str, npt.NDArray[np.bool_]]:
    """Which events each measure counts."""
    decode = events.phase == Phase.DECODE
    first = events.layer == 0
    decoded = np.cumsum(first & decode)
    seen = np.cumsum(np.where(first, events.tokens, 0))
    before = seen - events.tokens  # tokens of the session before this pass
    prompt = (events.step == 0) & ~decode
    return {
        "decode_64": decode & (decoded <= FIRST),
        "decode_256": decode & (decoded <= LATER),
        "session_64": before < FIRST,
        "session_64_by_token": before < FIRST,
        "first_prompt": prompt,
        "first_prompt_by_token": prompt,
    }


def slots(shape: ModelShape, share: float) -> SlotPlan:
    """So large a share of the experts."""
    return SlotPlan(shape, int(share * shape.total_experts))


def profile(fit: Trace, policy: str, share: float) -> Profile:
    """What is known after one half: the counts, and what the policy learnt while serving it."""
    controller = Controller(slots(fit.shape, share), parse(policy))
    controller.replay(fit.events())
    return replace(profile_of(fit, MARK), policy=controller.policy.name, learnt=learnt(controller))


def judge(judged: Session, policy: str, share: float, known: Profile | None, prior_tokens: int) -> Rates:
    """The hit rates of one session after one start, in percent; what it does not have is no number."""
    controller = Controller(slots(judged.events.shape, share), parse(policy))
    if known is not None:
        prime(controller, known, prior_tokens)
        controller.preload(known.hotness())
    return hit_rates(controller, judged)


def hit_rates(controller: Controller, judged: Session) -> Rates:
    """Replay a session and count hits by experts asked for, and by tokens that found their expert."""
    events = judged.events
    replayed = controller.replay(events, log=True)
    size = events.shape.experts
    event_of = np.repeat(np.arange(len(events)), np.diff(events.start))
    key = event_of * size + events.expert  # rising
    missed = np.repeat(np.arange(len(events)), replayed.misses) * size + replayed.log[:, 1]
    lost = np.zeros(events.accesses, np.bool_)
    lost[np.searchsorted(key, missed)] = True
    found = []
    for name in MEASURES:
        weight = judged.masks[name][event_of] * (events.count if name.endswith("by_token") else 1)
        found.append(100 * (1 - weight[lost].sum() / weight.sum()) if weight.any() else np.nan)
    return np.array(found)


def best_possible(works: Sequence[Workload], share: float) -> dict[str, float]:
    """The decode hit rate of the first tokens under the optimum, which knows the future: cold, or begun at its best."""
    rates: dict[str, list[float]] = {"cold": [], "any_start": []}
    for judged in (judged for work in works for judged in work.sessions):
        last = int(np.flatnonzero(judged.masks["decode_64"])[-1]) + 1
        events = judged.events.slice(0, last)
        part = Session(events, {name: mask[:last] for name, mask in judged.masks.items()})
        policy = Belady(phase="decode")
        for start, found in rates.items():
            controller = Controller(slots(events.shape, share), policy, prefill=policy.admission)
            if start == "any_start":
                controller.preload(1.0 / (1.0 + policy.with_future(controller.state, events).next_use))
            found.append(float(hit_rates(controller, part)[0]))
    return {start: _round(np.mean(found)) for start, found in rates.items()}


def table(works: Sequence[Workload], share: float, policy: str, prior_tokens: int = PRIOR_TOKENS) -> dict[str, Any]:
    """Every start of every workload, the means, and how much a wrong profile costs."""
    known = [profile(work.fit, policy, share) for work in works]
    merged = merge(known)
    rows = {}
    for place, work in enumerate(works):
        wrong = _others(works, place)
        found: dict[str, list[Any]] = {"cold": [None], "own": [known[place]], "merged": [merged]}
        found["wrong"] = [known[i] for i in wrong]
        # [profiles, measures] each, the mean of all sessions
        rates = {
            start: np.array(
                [np.mean([judge(s, policy, share, p, prior_tokens) for s in work.sessions], axis=0) for p in profiles]
            )
            for start, profiles in found.items()
        }
        harm = rates["wrong"][:, 1] - rates["cold"][0, 1]
        rows[work.name] = {start: rate.mean(axis=0) for start, rate in rates.items()} | {
            "wrong_minus_cold_256": _round(harm.mean()),
            "worst_wrong_minus_cold_256": _round(harm.min()),
            "worst_wrong": works[wrong[int(harm.argmin())]].name,
        }
    return _summary(rows)


def _others(works: Sequence[Workload], place: int) -> list[int]:
    """A few other workloads, seeded by this one's place."""
    others = [i for i in range(len(works)) if i != place]
    return sorted(np.random.default_rng(place).permutation(others)[:WRONGS].tolist())


def _summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    mean = {start: np.mean([row[start] for row in rows.values()], axis=0) for start in STARTS}
    return {
        "mean": {start: _named(rates) for start, rates in mean.items()},
        "own_minus_cold": _named(mean["own"] - mean["cold"]),
        "merged_minus_cold": _named(mean["merged"] - mean["cold"]),
        "wrong_minus_cold": _named(mean["wrong"] - mean["cold"]),
        "worst_workload_wrong_minus_cold_256": min(row["wrong_minus_cold_256"] for row in rows.values()),
        "worst_pair_wrong_minus_cold_256": min(row["worst_wrong_minus_cold_256"] for row in rows.values()),
        "workloads": {
            name: {key: _named(value) if key in STARTS else value for key, value in row.items()}
            for name, row in rows.items()
        },
    }


def _named(rates: Rates) -> dict[str, float]:
    return dict(zip(MEASURES, map(_round, rates), strict=True))


def _round(value: Any) -> float:
    return round(float(value), 2)


def replays(name: str, works: Sequence[Workload]) -> dict[str, Any]:
    """All that replays say of one model."""
    shape = works[0].fit.shape
    figures: dict[str, Any] = {
        "requests_fit": {work.name: work.fit.requests for work in works},
        "prompt_tokens_recorded": int(sum(work.fit.count(Phase.PREFILL) for work in works)),
        "budgets": {},
    }
    for share in SHARES:
        row: dict[str, Any] = {policy: table(works, share, policy) for policy in POLICIES}
        row["fill_bound_decode_64_points"] = _round(100 * share * shape.experts / (FIRST * shape.top_k))
        row["optimum_decode_64"] = best_possible(works, share)
        figures["budgets"][f"{share:.1%}"] = row
        _show(f"{name} {share:.1%}", row)
    figures["aim"] = aim(figures["budgets"]["25.0%"]["blend"]["own_minus_cold"])
    figures["prior_sweep_at_25%"] = {str(prior): brief(works, prior) for prior in PRIORS}
    for prior, found in figures["prior_sweep_at_25%"].items():
        print(name, "prior", prior, found, flush=True)
    return figures


def aim(gained: dict[str, float]) -> dict[str, Any]:
    """Which measures reach the aim for the first tokens."""
    return {
        "points": AIM_POINTS,
        "reached_by": [name for name, points in gained.items() if points >= AIM_POINTS],
        "missed_by": [name for name, points in gained.items() if points < AIM_POINTS],
    }


def brief(works: Sequence[Workload], prior_tokens: int) -> dict[str, float]:
    """The decode hit rates of blend at 25 % with one weight of the profile."""
    found = table(works, 0.25, "blend", prior_tokens)
    rates = {f"{start}_{n}": found["mean"][start][f"decode_{n}"] for start in STARTS for n in (FIRST, LATER)}
    worst = "worst_pair_wrong_minus_cold_256"
    return rates | {worst: found[worst]}


def _show(title: str, row: dict[str, Any]) -> None:
    print(title, "fill bound", row["fill_bound_decode_64_points"], "optimum", row["optimum_decode_64"])
    for policy in POLICIES:
        for start, rates in row[policy]["mean"].items():
            print(f"  {policy:5} {start:6}", "  ".join(f"{name} {rate:.1f}" for name, rate in rates.items()))
        worst = ("worst_workload_wrong_minus_cold_256", "worst_pair_wrong_minus_cold_256")
        print("       ", {name: row[policy][name] for name in worst}, flush=True)


class Watch:
    """What generate tells of every token: when it came, and the bytes that were waited for until then."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.times_s: list[float] = []
        self.loaded_bytes: list[int] = []

    def put(self, _: Any) -> None:
        """Note a token; the first call is the prompt."""
        self.times_s.append(time.perf_counter())
        self.loaded_bytes.append(self.engine.stats.clock.loaded_bytes)

    def end(self) -> None:
        """Nothing is left to do."""


def prompts(folder: Path, name: str) -> list[list[int]]:
    """The token ids of a workload's prompts, shuffled."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [prompt.text for prompt in reference.workload(name).prompts]
    order = np.random.default_rng(0).permutation(len(texts))
    return [tokenizer.encode(texts[i]).ids for i in order]


def answer(model: Any, ids: list[int], tokens: int) -> tuple[Watch, list[int]]:
    """Greedy text of so many tokens."""
    import torch

    watch = Watch(model.hotset.engine)
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    out = model.generate(torch.tensor([ids]), streamer=watch, **settings)
    return watch, out[0, len(ids) :].tolist()


def load_model(folder: Path, known: Path | None) -> tuple[Any, float]:
    """A fresh model at a quarter of its experts, and how long that took."""
    import hotset

    began = time.perf_counter()
    model = hotset.load(str(folder), memory="25%", device="cpu", profile=None if known is None else str(known))
    return model, time.perf_counter() - began


def learn(folder: Path, name: str, out: Path) -> Path:
    """Make the profile of a workload by running the second half of its prompts."""
    model, _ = load_model(folder, None)
    ids = prompts(folder, name)
    for one in ids[len(ids) // 2 :]:
        answer(model, one, PROFILE_TOKENS)
    path: Path = model.hotset.save_profile(out / f"{name}.safetensors")
    model.hotset.close()
    return path


def live_run(folder: Path, known: Path | None, ids: list[int], pause_s: float) -> dict[str, Any]:
    """Load, wait or not, answer one prompt, and say when its tokens came and what was read."""
    touch_memory()
    model, load_s = load_model(folder, known)
    loaded = time.perf_counter()
    fill: dict[str, Any] = {}
    if pause_s:
        model.hotset.wait_until_warm()
        fill = {"fill_s": time.perf_counter() - loaded, "fill_bytes": model.hotset.engine.offload.preloader.moved_bytes}
        time.sleep(max(0.0, loaded + pause_s - time.perf_counter()))
    asked, worked = time.perf_counter(), time.process_time()
    watch, tokens = answer(model, ids, LIVE_TOKENS)
    worked = time.process_time() - worked
    warm = model.hotset.wait_until_warm()
    stats = model.hotset.stats()
    model.hotset.close()
    del model
    gc.collect()
    return fill | {
        "load_s": load_s, "prompt_tokens": len(ids), "warm_at_the_end": warm,
        "first_token_s": watch.times_s[1] - asked, "first_64_tokens_s": watch.times_s[-1] - asked,
        "prompt_demand_bytes": watch.loaded_bytes[1], "demand_bytes": stats["loaded_bytes"],
        "background_bytes": stats["background_bytes"],
        "prefill_hit_rate": stats["prefill"]["hit_rate"], "decode_hit_rate": stats["decode"]["hit_rate"],
        "cpu_s": worked, "stall_s": stats["stall_s"], "load_average": os.getloadavg()[0], "tokens": tokens,
    }  # fmt: skip


def live(folder: Path, rounds: int) -> dict[str, Any]:
    """Cold, own and wrong starts in turn; with a profile, each prompt is given at once and after a pause."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        own, wrong = (learn(folder, name, Path(scratch)) for name in (OWN, WRONG))
        kinds: dict[str, Path | None] = {"cold": None, "own": own, "wrong": wrong}
        for number, ids in enumerate(prompts(folder, OWN)[:rounds]):
            for kind, pause_s in _in_turn(number):
                row = {"round": number, "kind": kind, "pause_s": pause_s}
                rows.append(row | live_run(folder, kinds[kind], ids, pause_s))
                print({k: v for k, v in rows[-1].items() if k != "tokens"}, flush=True)
    return live_figures(folder, rows)


def _in_turn(number: int) -> list[tuple[str, float]]:
    """The runs of a round, beginning with another one each time; a cold start gains nothing by a pause."""
    first = number % len(RUNS)
    return [*RUNS[first:], *RUNS[:first]]


def touch_memory() -> None:
    """Take as much memory as the slots need, and give it back: in a virtual machine new memory is slow at first."""
    np.ones(1200 << 17)


def live_figures(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians by kind, what was gained over the cold start of the same prompt, and whether the texts agree."""
    same = all(row["tokens"] == other["tokens"] for row in rows for other in rows if row["round"] == other["round"])
    fills = [row for row in rows if row.get("fill_bytes")]
    return {
        "model": f"{_described(folder)}; memory 25%, one torch thread, policy blend",
        "profiles": f"13 other prompts of {OWN} (own) or of {WRONG} (wrong), {PROFILE_TOKENS} tokens each",
        "texts_identical": same,
        "fill_s": statistics.median(row["fill_s"] for row in fills),
        "fill_bytes": statistics.median(row["fill_bytes"] for row in fills),
        "fill_bytes_per_s": statistics.median(row["fill_bytes"] / row["fill_s"] for row in fills),
        "medians": [_medians(rows, kind, pause_s) for kind, pause_s in RUNS],
        "runs": [{key: value for key, value in row.items() if key != "tokens"} for row in rows],
    }


def _described(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    size = sum(file.stat().st_size for file in folder.glob("*") if file.suffix in (".hotset", ".safetensors"))
    packed = "packed" if (folder / "experts.hotset").exists() else "plain"
    width = config["moe_intermediate_size"]
    return f"{config['architectures'][0]}, experts {width} wide, {size / 1e9:.2f} GB, {packed}"


def _medians(rows: list[dict[str, Any]], kind: str, pause_s: float) -> dict[str, Any]:
    chosen = [row for row in rows if (row["kind"], row["pause_s"]) == (kind, pause_s)]
    cold = [row for row in rows if row["kind"] == "cold"]
    names = (
        "first_token_s", "first_64_tokens_s", "prompt_demand_bytes", "demand_bytes", "background_bytes",
        "prefill_hit_rate", "decode_hit_rate", "stall_s", "cpu_s", "load_s", "load_average",
    )  # fmt: skip
    gained = {
        f"{name}_of_cold": statistics.median(a[name] / b[name] for a, b in zip(chosen, cold, strict=True))
        for name in ("first_token_s", "first_64_tokens_s")
    }
    medians = {name: statistics.median(row[name] for row in chosen) for name in names}
    return {"kind": kind, "prompt_after_s": pause_s, "runs": len(chosen)} | medians | gained


def earlier(part: str) -> Any:
    """A part of the result as it was published last, if it was."""
    path = RESULTS / "warm_start.json"
    return json.loads(path.read_text()).get(part) if path.exists() else None


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="the inflated reference model; without it nothing runs live")
    parser.add_argument("--rounds", type=int, default=5, help="prompts of the live part")
    parser.add_argument("--only-live", action="store_true", help="keep the replays as they were published last")
    options = parser.parse_args()
    if options.only_live:
        found: Any = earlier("replay")
    else:
        models = {"reference model": reference_workloads(), "gpt-oss-20b": gpt_oss_workloads()}
        found = {name: replays(name, works) for name, works in models.items() if works}
    ran = earlier("live") if options.model is None else live(options.model, options.rounds)
    publish(
        "warm_start",
        {
            "unit": "hit rate in percent; decode_N: the first N decode tokens; session_64: whole passes until 64 "
            "tokens, prompt included; first_prompt: the prompt alone; by experts asked for, or by token: every "
            "pair of a token with an expert that was resident when its event began is a hit, so that an expert read "
            "once for a prompt counts as missed by all its tokens: bytes follow the experts asked for",
            "starts": f"profile of one half of the requests, judged on the other half in {ORDERS} orders; wrong is the "
            f"mean of up to {WRONGS} other workloads; prior {PRIOR_TOKENS} tokens; slots filled before the first token",
            "fill_bound": "slots of a layer / (64 tokens * top_k): what a filled cache can save once, in points",
            "optimum": "Belady for decode, cold and begun with the best contents: no start can do better",
            "replay": found,
            "live": ran,
        },
    )


if __name__ == "__main__":
    main()
