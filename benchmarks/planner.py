"""What `hotset plan` expects against what is measured: formats, budgets and prompts on this CPU; the GPU's results.

CPU: the inflated reference model (4.4 GB of experts in bfloat16) packed as bfloat16, int8 and int4, four budgets, two
workloads; each setting is a process of its own in a control group, files cold, experts read past the page cache. The
calibration is that of `hotset doctor MODEL --measure`; hits are replays of the domain's recorded trace. Nothing is
fitted to what is judged: the interval's term for the model's own error is fitted to the settings of one domain, and
coverage is told of it, of the other domain and of the GPU apart. Goes on where an earlier run stopped. Needs Linux with
cgroup v1, and root; `--recompute` needs neither: it computes what is expected anew for the committed measurements.

python benchmarks/planner.py --folder DIR [--again] [--formats int4] [--shares 1 0.25] [--tokens 24] [--threads 2]
python benchmarks/planner.py --recompute
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

from cpu_speed import PEERS, PROMPTS, ROOMY_MIB, WIDTH, _wait_for_quiet
from hotset import reference
from hotset.files import write_beside
from planner_gpu import decode_settings, prompt_settings, workload_spread

from common import RESULTS, publish

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import limits

FORMATS = {"bf16": ("bfloat16", "auto"), "int8": ("int8", "int8"), "int4": ("int4", "int4")}
SHARES = (1.0, 0.5, 0.25, 0.125)
WORKLOADS = ("it", "c")
TOKENS, WARM_TOKENS = 48, 8
WITHIN, AIM, PAIRS_AIM = 0.20, 0.80, 0.90
FITTED_TO, GPU_FITTED_TO, COVERAGE = "it", "gpt-oss-20b", 0.90
"""The domain, and of a GPU the model, whose settings the interval's term for the model's own error was fitted to, and
what it aims at."""
MOST_OTHERS_CORES = 0.1
"""What other programs may take of the machine while one setting is measured."""
Row = dict[str, Any]


def prepare(folder: Path) -> None:
    """Make what is missing. Scales are not searched for: what they are has no part in how long a product takes."""
    from hotset.formats import _search
    from hotset.models.packing import pack

    folder.mkdir(parents=True, exist_ok=True)
    plain = folder / "w5632"
    if not (plain / "config.json").exists():
        reference.inflate(WIDTH, plain)
    _search.STEPS.update({bits: [1.0] for bits in _search.STEPS})
    for name, (_, experts) in FORMATS.items():
        if not (folder / name).exists():
            pack(plain, folder / name, experts=experts)


class Kept:
    """Results of an earlier run, in the folder, so that an interrupted one goes on."""

    def __init__(self, path: Path, again: bool) -> None:
        self.path = path
        self.document: dict[str, Any] = {} if again or not path.exists() else json.loads(path.read_text())

    def get(self, key: str, make: Any) -> Any:
        """What was found before, or is now; what other programs disturbed is measured again."""
        if key not in self.document or self.document[key].get("others_cores", 0) > MOST_OTHERS_CORES:
            self.document[key] = make()
            with write_beside(self.path) as scratch:
                scratch.write_text(json.dumps(self.document, indent=1))
        return self.document[key]


def calibrated(folder: Path, threads: int) -> dict[str, Any]:
    """The calibration of `hotset doctor MODEL --measure`, in a process of its own."""
    import subprocess

    environment = os.environ | {"XDG_DATA_HOME": str(folder / "xdg"), "OMP_NUM_THREADS": str(threads)}
    _wait_for_quiet()
    command = [sys.executable, "-W", "ignore", "-m", "hotset", "doctor", str(folder / "bf16"), "--measure", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)["calibration"]
    print(f"calibrated; other programs took {found['others_cores']} cores meanwhile", flush=True)
    found.pop("file")
    found.pop("curves")
    return found


def inflated(folder: Path) -> Path:
    """A folder with the config of the inflated model alone, from which its sizes are known."""
    config = json.loads((reference.path() / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": WIDTH}), encoding="utf-8")
    return folder


def expected(config: Path, calibration: dict[str, Any]) -> dict[str, Row]:
    """What the planner says of every setting."""
    from hotset.analysis.planner.calibration import read_document
    from hotset.analysis.planner.hits import replay_hits
    from hotset.analysis.planner.inspecting import inspect_model
    from hotset.analysis.planner.intervals import interval
    from hotset.analysis.planner.planning import Planner
    from hotset.analysis.planner.prompts import PromptTimes
    from hotset.analysis.planner.tiers import Memory
    from hotset.analysis.planner.times import TokenTimes
    from hotset.analysis.planner.workload import like

    rates = read_document(calibration | {"curves": {}}).rates()
    model, rows = inspect_model(str(config), 4096), {}
    for workload in WORKLOADS:
        hits = replay_hits(like(workload, model.shape).trace, ("blend",))
        planner = Planner(model, Memory(1 << 40), hits, lambda _: rates)
        tokens = _prompt_tokens(workload)
        for name, (precision, _) in FORMATS.items():
            times = TokenTimes(model, model.precision(precision), rates)
            prompts = PromptTimes(times, hits.popularity)
            for share in SHARES:
                slots = int(share * model.shape.total_experts)
                policy, token_s = planner.fastest(times, slots)
                low_s, high_s = interval(times, hits.curves[policy], slots, token_s)
                rows[key_of(name, share, workload)] = {
                    "tokens_per_s": 1 / token_s, "low": 1 / high_s, "high": 1 / low_s,
                    "hit_rate": hits.curves[policy].hit_rate(slots),
                    "prompt_s": sum(prompts.first_token_s(count, share) for count in tokens),
                }  # fmt: skip
    return rows


def _prompt_tokens(workload: str) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(reference.path() / "tokenizer.json"))
    return [len(tokenizer.encode(prompt.text).ids) for prompt in reference.workload(workload).prompts[:PROMPTS]]


def key_of(name: str, share: float, workload: str) -> str:
    """A setting in words."""
    return f"{FORMATS[name][0]}, {100 * share:g} %, {workload}"


def measured(folder: Path, name: str, share: float, workload: str, tokens: int, threads: int) -> Row:
    """One setting in a process of its own."""
    model = folder / name
    command = [sys.executable, "-W", "ignore", str(PEERS / "hotset_run.py"), "--model", str(model), "--memory",
               f"{100 * share:g}%", "--warm", str(WARM_TOKENS), "--workload", workload, "--tokens", str(tokens),
               "--prompts", str(PROMPTS), "--threads", str(threads)]  # fmt: skip
    _wait_for_quiet()
    limits.evict([model])
    outcome = limits.run(command, ROOMY_MIB << 20, timeout_s=600)
    if outcome.result is None:
        raise SystemExit(f"{key_of(name, share, workload)} failed: {outcome.stderr_tail[-400:]}")
    result = outcome.result
    return {
        "tokens_per_s": result["decode_tokens_per_s"], "hit_rate": result["decode_hit_rate"],
        "prompt_s": result["prefill_s"], "read_mb_per_token": result["decode_read_bytes_per_token"] / 1e6,
        "peak_mib": outcome.max_usage_bytes >> 20, "others_cores": round(outcome.others_cores, 2),
    }  # fmt: skip


def cpu_settings(kept: Kept, options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """All settings of this machine, measured one by one."""
    calibration = kept.get("calibration", lambda: calibrated(options.folder, options.threads))
    with tempfile.TemporaryDirectory() as place:
        said = expected(inflated(Path(place)), calibration)
    rows = []
    for share in options.shares:  # formats alternate, so that what else the machine does meets all of them alike
        for workload in WORKLOADS:
            for name in options.formats:
                key = key_of(name, share, workload)
                found = kept.get(
                    f"{key}, {options.tokens} tokens",
                    lambda n=name, s=share, w=workload: measured(
                        options.folder, n, s, w, options.tokens, options.threads
                    ),
                )
                rows.append(_row(key, said[key], found))
                print(_line(rows[-1]), flush=True)
    return rows, calibration


def recomputed() -> tuple[list[Row], dict[str, Any]]:
    """The committed measurements beside what is expected of them now, by the committed calibration."""
    document = json.loads((RESULTS / "planner.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as place:
        said = expected(inflated(Path(place)), document["calibration"])
    rows = []
    for row in document["rows"]:
        if row["machine"] == "CPU":
            found = {name: row[f"measured_{name}"] for name in ("tokens_per_s", "hit_rate", "prompt_s")}
            rows.append(_row(row["setting"], said[row["setting"]], found | {"others_cores": row["others_cores"]}))
            print(_line(rows[-1]), flush=True)
    return rows, document["calibration"]


def _row(key: str, said: Row, found: Row) -> Row:
    return {
        "machine": "CPU", "setting": key, "expected_tokens_per_s": said["tokens_per_s"],
        "expected_low": said["low"], "expected_high": said["high"],
        "measured_tokens_per_s": found["tokens_per_s"], "expected_hit_rate": said["hit_rate"],
        "measured_hit_rate": found["hit_rate"], "expected_prompt_s": said["prompt_s"],
        "measured_prompt_s": found["prompt_s"], "others_cores": found["others_cores"], "judged": True,
    }  # fmt: skip


def _line(row: Row) -> str:
    ratio = row["expected_tokens_per_s"] / row["measured_tokens_per_s"]
    hits = f"hits {100 * row['expected_hit_rate']:5.1f} and {100 * row['measured_hit_rate']:5.1f} %"
    speeds = f"{row['expected_tokens_per_s']:7.1f} expected, {row['measured_tokens_per_s']:7.1f} measured"
    note = "" if row["judged"] else "  (not judged)"
    return f"{row['machine']:5} {row['setting']:46} {speeds}, {ratio:5.2f}, {hits}{note}"


def judge(rows: list[Row]) -> dict[str, Any]:
    """How many settings are near, and how many pairs of one machine are in the right order."""
    judged = [row for row in rows if row["judged"]]
    near = [abs(row["expected_tokens_per_s"] / row["measured_tokens_per_s"] - 1) <= WITHIN for row in judged]
    pairs = [
        (one["expected_tokens_per_s"] - other["expected_tokens_per_s"])
        * (one["measured_tokens_per_s"] - other["measured_tokens_per_s"])
        > 0
        for one, other in combinations(judged, 2)
        if one["machine"] == other["machine"]
    ]
    ratios = [row["expected_tokens_per_s"] / row["measured_tokens_per_s"] for row in judged]
    return {
        "settings": len(judged), "within_20_percent": sum(near) / len(near),
        "pairs": len(pairs), "pairs_in_order": sum(pairs) / max(len(pairs), 1),
        "median_ratio": statistics.median(ratios), "aims": {"within_20_percent": AIM, "pairs_in_order": PAIRS_AIM},
    }  # fmt: skip


def judge_intervals(rows: list[Row]) -> dict[str, Any]:
    """How many measured speeds lie inside of the intervals: where the model's own error was fitted, and elsewhere."""
    from hotset.analysis.planner.intervals import GPU_MODEL_SPREAD, MODEL_SPREAD

    cpu = [row for row in rows if row["machine"] == "CPU"]
    gpu = [row for row in rows if row["machine"] != "CPU" and row["judged"]]
    own, own_gpu = f", {FITTED_TO}", f"{GPU_FITTED_TO}, "
    splits = {
        f"CPU{own} (fitted to)": [row for row in cpu if row["setting"].endswith(own)],
        "CPU, others": [row for row in cpu if not row["setting"].endswith(own)],
        f"H200, {GPU_FITTED_TO} (fitted to)": [row for row in gpu if row["setting"].startswith(own_gpu)],
        "H200, others": [row for row in gpu if not row["setting"].startswith(own_gpu)],
    }
    found: dict[str, Any] = {
        "model_spread": MODEL_SPREAD, "gpu_model_spread": GPU_MODEL_SPREAD, "needed_by_what_it_is_fitted_to": None,
    }  # fmt: skip
    for name, part in splits.items():
        if part:
            inside = [row["expected_low"] <= row["measured_tokens_per_s"] <= row["expected_high"] for row in part]
            found[name] = {"settings": len(part), "inside": sum(inside)}
    if fitted := splits[f"CPU{own} (fitted to)"]:
        found["needed_by_what_it_is_fitted_to"] = needed_spread(fitted, MODEL_SPREAD)
    fitted = splits[f"H200, {GPU_FITTED_TO} (fitted to)"]
    found["needed_by_what_the_gpu_is_fitted_to"] = needed_spread(fitted, GPU_MODEL_SPREAD)
    return found


def needed_spread(rows: list[Row], taken: float) -> float:
    """The least term with which nine in ten more settings like these are expected inside of their intervals.

    That is the (n + 1) x 0.9th of n settings, by how much each needs beside the other terms.
    """
    needed = []
    for row in rows:
        off = abs(math.log(row["measured_tokens_per_s"] / row["expected_tokens_per_s"]))
        others = (row["expected_high"] / row["expected_tokens_per_s"] - 1) ** 2 - taken**2
        needed.append(math.sqrt(max(math.expm1(off) ** 2 - others, 0.0)))
    return sorted(needed)[min(math.ceil((len(rows) + 1) * COVERAGE), len(rows)) - 1]


def judge_prompts(rows: list[Row], gpu: list[Row]) -> dict[str, Any]:
    """The same for first tokens: a rougher model, told apart."""
    ratios = [row["expected_prompt_s"] / row["measured_prompt_s"] for row in rows]
    ratios += [row["expected_s"] / row["measured_s"] for row in gpu]
    return {"settings": len(ratios), "within_20_percent": sum(abs(r - 1) <= WITHIN for r in ratios) / len(ratios),
            "within_half": sum(0.5 <= r <= 1.5 for r in ratios) / len(ratios)}  # fmt: skip


def main() -> None:
    """Predict, measure, judge, publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=RESULTS.parents[1] / "out" / "planner")
    parser.add_argument("--again", action="store_true", help="forget what an earlier run measured")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-cpu", action="store_true", help="judge the GPU's committed results alone")
    parser.add_argument("--recompute", action="store_true", help="expect anew, and measure nothing")
    parser.add_argument("--dry", action="store_true", help="print, and publish nothing")
    options = parser.parse_args()
    rows, calibration = [], None
    if options.recompute:
        rows, calibration = recomputed()
    elif not options.no_cpu:
        prepare(options.folder)
        rows, calibration = cpu_settings(Kept(options.folder / "planner_runs.json", options.again), options)
    gpu, prompts = decode_settings(), prompt_settings()
    for row in gpu:
        print(_line(row), flush=True)
    for row in prompts:
        print(
            f"first token, {row['setting']:54} {row['expected_s']:7.3f} s expected, {row['measured_s']:7.3f} measured"
        )
    summary = {"all": judge(rows + gpu), "gpu": judge(gpu), "prompts": judge_prompts(rows, prompts)}
    summary["intervals"] = judge_intervals(rows + gpu)
    if rows:
        summary["cpu"] = judge(rows)
        summary["prompts_cpu"], summary["prompts_gpu"] = judge_prompts(rows, []), judge_prompts([], prompts)
    for name, found in summary.items():
        print(name, {key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()})
    spread = workload_spread()
    for kind in ("over_generic", "over_like"):
        ratios = sorted(ratio for each in spread["domains"].values() for ratio in each[kind])
        print(
            f"misses of 14 domains {kind}: {ratios[0]:.2f} to {ratios[-1]:.2f}, median {statistics.median(ratios):.2f}"
        )
    if not options.dry:
        publish("planner", {
            "summary": summary, "rows": rows + gpu, "prompts": prompts, "workloads": spread, "calibration": calibration,
            "new_tokens": options.tokens, "threads": options.threads,
        })  # fmt: skip


if __name__ == "__main__":
    main()
