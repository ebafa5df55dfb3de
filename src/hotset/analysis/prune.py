"""`hotset prune`: a checkpoint without some of its experts, which plain transformers loads. Lossy."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hotset.analysis.prune_choice import Grid, Kept, choose, kept_count
from hotset.analysis.prune_families import notes_of, smaller_config
from hotset.analysis.prune_plan import PrunePlan, shapes_of, smaller_model
from hotset.analysis.prune_source import RECORD_FILE, PruneSource
from hotset.analysis.prune_writer import PruneFolder, tidy
from hotset.analysis.saliency import MEASURES, MIN_TOKENS, Saliency
from hotset.analysis.saliency_runs import BuiltInText, Workload, record_saliency
from hotset.errors import HotsetError
from hotset.models.packing import fingerprint
from hotset.options import RunOptions
from hotset.profile import Fingerprint, Profile
from hotset.profile.folder import locate
from hotset.reading import parse_bounded
from hotset.store.dense import shards_of

SHARD_BYTES = 1 << 30
"""A kill costs what was written of one file."""
STATE_FILE = "saliency.safetensors"
"""What a run over text has come to, in the folder of a checkpoint that is not finished."""
_NOT_LOOKED_FOR = "super experts were not looked for: one may be among those that are gone"
_HOW_SALIENCY = "; hotset prune --text FILE --save-saliency FILE keeps one"
Bar = Callable[[str], AbstractContextManager[Callable[[int, int], None] | None]]
"""Given what is done, a progress callback for the length of a block."""


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What a prune came to."""

    folder: Path
    by: str
    experts: int  # of each layer, before
    keep: int  # and after
    kept: Kept
    super_experts: list[tuple[int, int]]  # all of them are kept
    size_bytes: int  # of the weights
    original_bytes: int
    resumed: int  # files that an earlier, interrupted run had written
    seconds: float
    lossy: str
    notes: list[str] = field(default_factory=list)
    complete_already: bool = False


@dataclass(frozen=True)
class Pruner:
    """What to prune, by which measure, and what the measure is taken from: one of a workload, a profile, a file."""

    model: str
    out: Path
    by: str
    keep: str
    options: RunOptions
    workload: Workload | None = None
    profile: str | None = None
    saliency: Path | None = None
    save_saliency: Path | None = None
    drop_super_experts: bool = False  # with a profile: do without the run that finds them
    shard_bytes: int = SHARD_BYTES

    def prune(self, bar: Bar) -> PruneReport:
        """Choose experts and write the checkpoint, from where an interrupted run has stopped."""
        began, out = time.perf_counter(), self.out.absolute()
        self._check()
        source = PruneSource.open(self.model, trust_remote_code=self.options.trust_remote_code)
        keep = kept_count(self.keep, source.rules)
        config = smaller_config(source.config, source.checkpoint.model, source.rules.experts, keep)
        shapes = shapes_of(smaller_model(source.checkpoint.model, config, keep))
        first = choose(np.zeros((len(source.checkpoint.moe_layers), source.rules.experts)), keep, source.rules)
        PrunePlan(source.checkpoint, shapes, first)  # what cannot be cut is refused before the work
        owner = self._owner(source, keep)
        if os.path.lexists(out):
            report = _already(out, owner, source, began)
            if self.save_saliency is not None:
                raise HotsetError(
                    f"{self.out} is complete, so nothing runs that --save-saliency would keep: leave it out, or give "
                    "another -o"
                )
            return report
        known = self._known(source)
        with PruneFolder(out, owner) as folder:
            judged = known or self._recorded(folder.folder / STATE_FILE, bar)
            if self.profile is not None and not self.drop_super_experts:
                judged = replace(judged, protected=self._super_experts(folder.folder / STATE_FILE, bar))
            kept = choose(judged.scores, keep, source.rules, judged.protected)
            folder.choose(json.dumps(kept).encode())
            plan = PrunePlan(source.checkpoint, shapes, kept)
            record = self._record(source, owner, judged, kept, plan)
            small = source.small_files(config) | {RECORD_FILE: (json.dumps(record) + "\n").encode()}
            with bar("pruning") as progress:
                resumed = folder.write(shards_of(plan.tensors, self.shard_bytes), small.items(), progress)
            if self.save_saliency is not None and judged.saliency is not None:
                judged.saliency.save(self.save_saliency)  # last, so that what was interrupted can be given again
            folder.finish(STATE_FILE)
        return _report(out, record, source, began, resumed=resumed)

    def _check(self) -> None:
        """Refuse what does not go together."""
        if self.by not in MEASURES:
            raise HotsetError(f"experts are judged by {', '.join(MEASURES)}, not {self.by!r:.40}")
        given = [each for each in (self.workload, self.profile, self.saliency) if each is not None]
        if len(given) != 1:
            raise HotsetError(
                "say what the experts are judged by: one of --text FILE, --prompts FILE, --saliency FILE and, for "
                "--by frequency, --profile NAME"
            )
        if self.profile is not None and self.by != "frequency":
            raise HotsetError(
                f"a profile has counts, and --by {self.by} needs the outputs of experts: use --by frequency, or --text "
                "FILE"
            )
        if self.drop_super_experts and self.profile is None:
            raise HotsetError("--drop-super-experts is for --profile, which does not know them: leave it out")
        if self.save_saliency is not None and self.workload is None:
            raise HotsetError("--save-saliency keeps what was recorded over --text or --prompts: add one of them")

    def _owner(self, source: PruneSource, keep: int) -> dict[str, str]:
        if self.workload is not None:
            judged = self.workload.name
        elif self.profile is not None:
            without = ", super experts not looked for" if self.drop_super_experts else ""
            judged = _dated("profile", locate(self.profile)) + without
        else:
            judged = _dated("saliency", self.saliency or Path())
        state = fingerprint(source.checkpoint.files, source.folder)
        return {"criterion": self.by, "keep": str(keep), "text": judged, "original": state}

    def _known(self, source: PruneSource) -> _Judged | None:
        """The scores of all experts by a file, if there is one: what is wrong with it is found before the work."""
        if self.profile is not None:
            judged = _judged_by_profile(Profile.load(locate(self.profile)), source)
            return replace(judged, notes=[_NOT_LOOKED_FOR]) if self.drop_super_experts else judged
        if self.saliency is None:
            return None
        found = Saliency.load(self.saliency)
        found.check(source.fingerprint(), len(source.checkpoint.moe_layers), source.rules.experts)
        return _judged_by(found, self.by)

    def _recorded(self, state: Path, bar: Bar) -> _Judged:
        """The scores of all experts by a run over text."""
        if self.workload is None:
            raise HotsetError("there is nothing to judge experts by: --text FILE")
        with bar("recording saliency") as progress:
            found = record_saliency(self.model, self.workload, self.options, state=state, progress=progress)
        return _judged_by(found, self.by)

    def _super_experts(self, state: Path, bar: Bar) -> Any:
        """The experts that no profile tells and that must stay: by a short run over the text that ships with hotset."""
        try:
            with bar("looking for super experts") as progress:
                found = record_saliency(self.model, BuiltInText(), self.options, state=state, progress=progress)
        except (HotsetError, ImportError, ValueError, RuntimeError, MemoryError) as error:
            raise HotsetError(
                f"super experts, which must not be dropped, cannot be found: the model does not run here ({error}); "
                "--drop-super-experts prunes without knowing them"
            ) from error
        return found.super_experts()

    def _record(
        self, source: PruneSource, owner: dict[str, str], judged: _Judged, kept: Kept, plan: PrunePlan
    ) -> dict[str, Any]:
        """What the checkpoint says of itself."""
        keep, experts = len(kept[0]), source.rules.experts
        notes = [*judged.notes, *(notes_of(source.checkpoint.model) if keep < experts else [])]
        if plan.unused:
            notes.append(
                f"{len(plan.unused):,} tensors that transformers does not load are left out, {plan.unused[0]} the first"
            )
        protected = [] if judged.protected is None else np.argwhere(judged.protected).tolist()
        return {
            "format": 1,
            "criterion": self.by,
            "text": owner["text"],
            "experts": experts,
            "keep": keep,
            "kept": [list(layer) for layer in kept],
            "super_experts": protected,
            "original": {"name": source.name, "fingerprint": asdict(judged.fingerprint), "bytes": source.size_bytes},
            "lossy": _lossy(keep, experts, self.by),
            "notes": notes,
            "owner": owner,
        }


@dataclass(frozen=True)
class _Judged:
    """Scores, the experts that are kept whatever their score, and the model that all this is of."""

    scores: Grid
    protected: Any
    fingerprint: Fingerprint
    notes: list[str]
    saliency: Saliency | None = None  # that all this follows from


def _judged_by(saliency: Saliency, by: str) -> _Judged:
    notes = []
    if few := saliency.few():
        notes.append(
            f"{few:,} of {saliency.counts().size:,} experts were reached by fewer than {MIN_TOKENS} tokens: more text "
            "judges them better"
        )
    return _Judged(saliency.scores(by), saliency.super_experts(), saliency.fingerprint, notes, saliency)


def _judged_by_profile(profile: Profile, source: PruneSource) -> _Judged:
    shape, layers = profile.shape, len(source.checkpoint.moe_layers)
    if (shape.layers, shape.experts) != (layers, source.rules.experts):
        raise HotsetError(
            f"the profile is of a model with {shape.layers} x {shape.experts} experts, and this one has "
            f"{layers} x {source.rules.experts}: use a profile of this model"
        )
    own = source.fingerprint()
    if why := profile.fingerprint.refuse(own, allow_foreign=False):
        raise HotsetError(f"the profile does not fit: {why.partition(':')[0]}; use a profile of this model")
    return _Judged(profile.uses.sum(axis=0), None, own, [])


def _lossy(keep: int, experts: int, by: str) -> str:
    if keep == experts:
        return "nothing was dropped: all experts are kept"
    return f"lossy: {experts - keep} of {experts} experts of every layer are gone, those with the least {by}"


def _dated(kind: str, path: Path) -> str:
    """A file that was given, so that another state of it is told from this one."""
    try:
        state = path.stat()
    except OSError as error:
        remedy = "; hotset profile list shows those there are" if kind == "profile" else _HOW_SALIENCY
        raise HotsetError(f"cannot read the {kind} {path}: {error.strerror or error}{remedy}") from error
    return f"{kind} {path.name}, {state.st_size:,} bytes of {state.st_mtime_ns}"


def _already(out: Path, owner: dict[str, str], source: PruneSource, began: float) -> PruneReport:
    """What to say of a folder that is there: complete if it is what was asked for, refused if not."""
    try:
        record = parse_bounded((out / RECORD_FILE).read_bytes(), values=1 << 22, containers=1 << 18)
        same = record["owner"] == owner
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise HotsetError(f"{out} exists: choose another name for the pruned model, or remove it")
    tidy(out)
    return _report(out, record, source, began, complete_already=True)


def _report(
    out: Path,
    record: dict[str, Any],
    source: PruneSource,
    began: float,
    *,
    resumed: int = 0,
    complete_already: bool = False,
) -> PruneReport:
    return PruneReport(
        folder=out,
        by=record["criterion"],
        experts=record["experts"],
        keep=record["keep"],
        kept=tuple(tuple(layer) for layer in record["kept"]),
        super_experts=[(layer, expert) for layer, expert in record["super_experts"]],
        size_bytes=sum(file.stat().st_size for file in out.glob("*.safetensors")),
        original_bytes=source.size_bytes,
        resumed=resumed,
        seconds=time.perf_counter() - began,
        lossy=record["lossy"],
        notes=record["notes"],
        complete_already=complete_already,
    )
