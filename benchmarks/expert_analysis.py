"""What `hotset analyze` finds on the reference model's 14 domains and on the public gpt-oss-20b trace, and its cost.

`python benchmarks/expert_analysis.py` writes the figures that docs/results/experts.md quotes.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import numpy as np

from hotset import reference
from hotset.analysis.analyse import Analysis, analyse, join_traces
from hotset.analysis.labels import LabelStudy
from hotset.analysis.page import to_page
from hotset.trace import Phase, Trace

from common import gpt_oss, publish


def reference_domains() -> Trace:
    """The recorded traces of all domains, end to end."""
    return join_traces({name: reference.trace(name) for name in reference.DOMAINS})[1]


def study(name: str, trace: Trace) -> dict[str, Any]:
    """Analyse a workload, and say what it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = analyse(name, trace)
    page = to_page(found)[0]
    return {
        "workload": name,
        "requests": trace.requests,
        "tokens": {phase.name.lower(): trace.count(phase) for phase in Phase},
        "layers": trace.shape.layers,
        "experts": trace.shape.experts,
        "top_k": trace.shape.top_k,
        "cpu_s": round(time.process_time() - cpu, 1),
        "wall_s": round(time.perf_counter() - wall, 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "page_bytes": len(page.encode()),
        **findings(found),
    }


def findings(found: Analysis) -> dict[str, Any]:
    """The report in few numbers."""
    usage, repeats = found.usage, found.repeats
    return {
        "effective_experts": _spread(usage.effective),
        "gini": _spread(usage.gini),
        "dead": int(usage.dead.sum()),
        "dead_by_chance": float(usage.dead_by_chance.sum()),
        "gap_first_second_median": None if found.margins is None else _spread(found.margins.first_gap[:, 1]),
        "labels": {each.key: _label(each) for each in found.labels},
        "mean_log2_lift": {
            where: None if pairs is None else _spread(pairs.spread)
            for where, pairs in (("within", found.within), ("between", found.between))
        },
        "repeats": {str(lag): float(rate) for lag, rate in zip(repeats.lags, repeats.overall, strict=True)},
        "repeats_by_chance": {"even": repeats.even, "all": repeats.popularity, "request": repeats.request},
        "driven_experts": None if found.drivers is None else len(found.drivers),
        "hit_rates": {
            f"{row.policy}, {row.budget}": row.hit_rate for row in found.caching.rows if row.phase == "decode"
        },
        "precision": {f"{each.policy}, {each.budget}": each.as_dict()["precision"] for each in found.caching.kept},
        "lookahead_recall": [] if found.lookahead is None else [score.recall for score in found.lookahead.scores],
    }


def _label(study: LabelStudy) -> dict[str, Any]:
    values, distance, layers = study.values, study.distance, study.divergence
    pairs = np.triu_indices(len(values), 1)
    order = np.argsort(distance[pairs])
    ends = [(int(pairs[0][place]), int(pairs[1][place])) for place in (order[0], order[-1])]
    return {
        "values": len(values),
        "mean_distance": study.mean_distances()[0],
        "nearest": [values[ends[0][0]], values[ends[0][1]], float(distance[ends[0]])],
        "farthest": [values[ends[1][0]], values[ends[1][1]], float(distance[ends[1]])],
        "distance_by_chance": study.mean_distances()[1],
        "divergence_by_layer_bits": np.nanmean(layers[pairs], axis=0).round(4).tolist(),
        "experts_above_chance": None if study.chance is None else int(study.above_chance().sum()),
        "strongest": study.strongest(5),
    }


def _spread(values: Any) -> dict[str, float]:
    return {"mean": float(np.nanmean(values)), "min": float(np.nanmin(values)), "max": float(np.nanmax(values))}


def main() -> None:
    """Study both workloads; compiled code is warmed up by the first, small one."""
    analyse("warm-up", reference.trace("it"))
    rows = [study("reference, 14 domains", reference_domains())]
    public = gpt_oss()
    if public is None:
        sys.exit("the public gpt-oss-20b trace is not there: see benchmarks/README.md")
    rows.append(study("gpt-oss-20b, public trace", public))
    for row in rows:
        hits = ", ".join(f"{name} {rate:.1%}" for name, rate in row["hit_rates"].items())
        print(f"{row['workload']}: {row['cpu_s']} s of CPU, {row['peak_mb']} MB, page {row['page_bytes']:,} B; {hits}")
    publish("expert_analysis", {"workloads": rows})


if __name__ == "__main__":
    main()
