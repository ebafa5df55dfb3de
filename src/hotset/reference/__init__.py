"""The small trained model that ships with hotset: where it lies, its workloads and their recorded traces."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hotset.errors import HotsetError

if TYPE_CHECKING:
    from hotset.trace import Trace

DOMAINS = (
    "en_prose", "en_tech", "it", "de", "fr", "es", "ru", "ja", "zh", "python", "c", "json", "metamath", "latex",
)  # fmt: skip
MIXED = ("chat_it", "switch", "users")

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a workload; turns of one chat share a session."""

    domain: str
    text: str
    session: str


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that belong together, in their order."""

    name: str
    prompts: tuple[Prompt, ...]


def path() -> Path:
    """The folder of the model: an ordinary checkpoint that transformers loads without hotset."""
    return _HERE / "model"


def workloads() -> tuple[str, ...]:
    """The names of all workloads: one per domain, then the mixed ones."""
    return DOMAINS + MIXED


def workload(name: str) -> Workload:
    """The requests of one workload."""
    document = json.loads((_HERE / "prompts" / f"{_known(name)}.json").read_text(encoding="utf-8"))
    return Workload(name, tuple(_prompts(document)))


def trace_path(name: str) -> Path:
    """Where the recorded trace of one workload lies."""
    return _HERE / "traces" / f"{_known(name)}.safetensors"


def trace(name: str) -> Trace:
    """The recorded trace of one workload."""
    from hotset.trace import Trace

    return Trace.load(trace_path(name))


def inflate(width: int, out: str | Path, *, shard_bytes: int = 1_000_000_000) -> Path:
    """Write the model with every expert padded to `width`: a checkpoint as large as wanted that says the same."""
    from hotset.reference.inflation import write_checkpoint

    return write_checkpoint(path(), width, Path(out), shard_bytes)


def _known(name: str) -> str:
    if name not in workloads():
        raise HotsetError(f'no workload is called "{name}"; there are {", ".join(workloads())}')
    return name


def _prompts(document: dict[str, list[object]]) -> list[Prompt]:
    if "prompts" in document:
        return [Prompt(str(document["domain"]), str(text), str(i)) for i, text in enumerate(document["prompts"])]
    if "requests" in document:
        return [_turn(request, str(i)) for i, request in enumerate(document["requests"])]
    sessions = enumerate(document["sessions"])
    return [_turn(turn, str(i)) for i, session in sessions if isinstance(session, dict) for turn in session["turns"]]


def _turn(turn: object, session: str) -> Prompt:
    if not isinstance(turn, dict):
        raise HotsetError("a workload file is damaged: reinstall hotset")
    return Prompt(turn["domain"], turn["text"], session)
