"""A recording says which cache it ran with, and `hotset simulate TRACE --fit 0` alone repeats the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from typer.testing import CliRunner  # noqa: E402

import hotset  # noqa: E402
from hotset import reference  # noqa: E402
from hotset.cli.app import app  # noqa: E402
from hotset.sim import Sweep, simulate  # noqa: E402
from hotset.trace import Trace  # noqa: E402
from hotset.trace.combine import concat, interleave  # noqa: E402
from hotset.trace.run import Run  # noqa: E402

COUNTS = ("hits", "misses", "evictions", "staged")


def generate(model: Any, seed: int, tokens: int = 10) -> None:
    ids = torch.randint(3, 400, (1, 12), generator=torch.Generator().manual_seed(seed))
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0)


def record(path: Path, memory: str, *, before: bool = False, **options: Any) -> dict[str, Any]:
    """Record two requests; returns what the live cache counted."""
    with hotset.load(reference.path(), memory=memory, **options).hotset as handle:
        model = handle._model()
        if before:
            generate(model, 9)
            handle.reset_stats()
        with handle.trace(path):
            generate(model, 1)
            generate(model, 2)
        stats: dict[str, Any] = handle.stats()
        return stats | {"ahead": handle.engine.controller.plan.prefetch_rows}


def replayed(path: Path) -> tuple[dict[tuple[str, str, int], dict[str, Any]], list[str]]:
    """The cold rows of the command line, by phase, policy and slots, and its notes."""
    done = CliRunner().invoke(app, ["simulate", str(path), "--fit", "0", "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    return {(row["phase"], row["policy"], row["budget_slots"]): row for row in document["rows"]}, document["notes"]


def check(path: Path, stats: dict[str, Any], policy: str) -> None:
    rows, notes = replayed(path)
    for phase in ("prefill", "decode"):
        live, row = stats[phase], rows[phase, policy, stats["slots"]]
        assert (row["scope"], row["staging_slots"]) == (stats["scope"], stats["staging"])
        found = {name: row[name] for name in COUNTS}
        assert found == {name: live["evicted" if name == "evictions" else name] for name in COUNTS}
    assert any("its cold row repeats that run" in note for note in notes)


@pytest.mark.parametrize(
    ("policy", "memory", "options"),
    [
        ("blend", "60MiB", {}),
        ("lru", "40MiB", {"scope": "pool"}),
        ("static", "60MiB", {}),
        ("slru:hint=on", "30%", {"prefetch": "off"}),
        ("nextuse", "60MiB", {}),
        ("nextuse", "13%", {"prefetch": "off", "staging": 2}),
    ],
)
def test_the_command_line_repeats_a_run(policy: str, memory: str, options: dict[str, Any], tmp_path: Path) -> None:
    size = reference_experts()
    budget = memory if memory.endswith("%") else f"{size * int(memory.removesuffix('MiB')) // 100}"
    stats = record(tmp_path / "t.safetensors", budget, policy=policy, **options)
    assert stats["misses"] > 0
    assert (stats["ahead"] > 0) == (not memory.endswith("%")), "the budget pays for predictions, too"
    check(tmp_path / "t.safetensors", stats, policy)


def reference_experts() -> int:
    """The bytes of all experts of the reference model; a budget of bytes is a share of them here."""
    with hotset.load(reference.path(), memory="25%").hotset as handle:
        shape = handle.engine.controller.plan.shape
        return int(shape.total_experts * (shape.expert_bytes or 0))


def test_the_same_budget_in_bytes_buys_the_same_slots(tmp_path: Path) -> None:
    """Predictions were paid for by the run and not by the replay: 49.6 against 50.4 % in one case."""
    budget = str(reference_experts() * 6 // 10)
    stats = record(tmp_path / "t.safetensors", budget)
    rows = simulate(
        {"t": Trace.load(tmp_path / "t.safetensors")}, Sweep(policies=["blend"], budgets=[budget], fit=0)
    ).rows
    decode = next(row for row in rows if row.policy == "blend" and row.phase == "decode")
    assert stats["ahead"] > 0
    assert (decode.budget_slots, decode.hits) == (stats["slots"], stats["decode"]["hits"])


def test_what_is_not_the_whole_run_says_so(tmp_path: Path) -> None:
    stats = record(tmp_path / "t.safetensors", "25%", before=True)
    trace = Trace.load(tmp_path / "t.safetensors")
    run = Run.of(trace)
    assert run is not None
    assert (run.slots, run.scope, run.policy) == (stats["slots"], "layer", "blend")
    assert run.differs == "the cache had served others before"
    _, notes = replayed(tmp_path / "t.safetensors")
    assert any("a replay differs from that run" in note for note in notes)


def test_a_part_of_a_run_is_not_the_run() -> None:
    whole = traced()
    every = np.ones(whole.tokens, bool)
    assert Run.of(whole.take(every)) == Run.of(whole) == Run("lru", "pool", 4, 2, 1)
    for part in (whole.take(slice(1, None)), whole.select([0]), concat([whole, whole]), interleave(whole, 2)):
        run = Run.of(part)
        assert run is not None
        assert run.differs
    assert Run.of(interleave(whole, 1)) == Run.of(whole)


@pytest.mark.parametrize(
    "meta",
    [
        {"run.slots": "x"}, {"run.slots": "9" * 50}, {"run.slots": "٣"}, {"run.scope": "galaxy"}, {"run.staging": "-1"},
        {"run.policy": "no such policy"}, {"run.policy": "belady"}, {"run.slots": "999999"}, {"run.slots": "0"},
    ],
)  # fmt: skip
def test_meta_that_cannot_be_changes_nothing(meta: dict[str, str]) -> None:
    result = simulate({"t": traced(**meta)}, Sweep(policies=["lru"], budgets=["50%"], fit=0))
    assert {row.policy for row in result.rows} == {"lru", "belady"}
    assert simulate({"t": traced(**meta)}, Sweep(fit=0)).rows


def traced(**meta: str) -> Trace:
    """A small trace that says it is a recording."""
    experts = np.array([[[0, 1]], [[1, 2]], [[2, 3]], [[0, 3]]], np.int16)
    numbers = np.arange(4, dtype=np.int32)
    return Trace(
        hotset.ModelShape(1, 8, 2, 1000), experts, numbers // 2, numbers, np.ones(4, np.uint8),
        meta=Run("lru", "pool", 4, 2, 1).to_meta() | {name.replace("__", "."): text for name, text in meta.items()},
    )  # fmt: skip
