"""Mutated config, tokenizer, template and index files of the reference model, through the commands' own entry.

    python benchmarks/trust/model_files.py --count 2500 --seed 1
    python benchmarks/trust/model_files.py --model gguf --count 150 --seed 1      or fp8, int4, gptq, awq, nvfp4, mxfp4

Of a quantised checkpoint the config and the weights' header are mutated, of a GGUF model its file's header.
Every case is a folder with one mutated file, given to `run`, `chat` or `doctor` in a worker process with a limit of
memory and of time. It must end with exit code 0, or with 2 and one line on stderr. In between the intact model is
run, and must say what it said at first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from binary_mutations import gguf_file, safetensors_file
from mutations import mutate

RESULT = Path(__file__).parents[1] / "results" / "trust_model_files.json"
SHARD = "model-00001-of-00001.safetensors"
TIMEOUT_S = 240.0
MORE_MEMORY_BYTES = 3 * 1024**3
FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "model.safetensors.index.json", "special_tokens_map.json",
)  # fmt: skip
WEIGHTS = (6, 6, 4, 4, 4, 3, 2)
REFERENCE, GGUF = "reference", "model.gguf"
QUANTISATION = "quantization_config"
QUANTISED = {
    "fp8": "fp8, DeepSeek-V3", "int4": "int4, asymmetric", "gptq": "gptq, version 2, any order", "awq": "awq",
    "nvfp4": "nvfp4, modelopt", "mxfp4": "mxfp4, compressed-tensors",
}  # fmt: skip
"""Checkpoints with experts in a published layout, as the tests make them."""
COMMANDS = {
    "run": ["-p", "Il mercato del", "--max-new-tokens", "2", "--memory", "25%"],
    "chat": ["--max-new-tokens", "2", "--memory", "25%"],
    "doctor": [],
}
USUAL, RARE = ("run", "chat"), "doctor"


@dataclass
class Outcome:
    """How one case ended."""

    case: int
    file: str
    command: str
    code: int
    stdout: str = ""
    stderr: str = ""
    fault: str | None = None


def base_folder(place: Path) -> Path:
    """The reference model with all the small files that a model may have."""
    from safetensors import safe_open

    from hotset import reference

    shutil.copytree(reference.path(), place)
    (place / "model.safetensors").rename(place / SHARD)
    with safe_open(place / SHARD, "np") as file:
        names = dict.fromkeys(file.keys(), SHARD)
    index = {"metadata": {"total_size": (place / SHARD).stat().st_size}, "weight_map": names}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    words = ("bos_token", "eos_token", "pad_token", "unk_token")
    (place / "special_tokens_map.json").write_text(json.dumps(dict.fromkeys(words, "<|endoftext|>")))
    return place


def quantised_folder(place: Path, kind: str) -> Path:
    """The reference model with its experts in a weight format, or as a GGUF file."""
    from hotset import reference

    tests = Path(__file__).parents[2] / "tests"
    sys.path[:0] = [str(tests / name) for name in ("formats", "support")]
    if kind == "gguf":
        import gguf_models

        place.mkdir()
        gguf_models.from_folder(Path(reference.path()), place / GGUF, gguf_models.matrices_as("Q4_0", "BF16"))
        return place
    import encoded_models
    import published

    made = published.PUBLISHED[QUANTISED[kind]]
    encoded_models.rewrite(Path(reference.path()), place, lambda name, matrix: made.named(name, matrix.float()))
    encoded_models.edit_config(place, quantization_config=made.config)
    return place


def mutated(name: str, original: bytes, rng: random.Random) -> bytes:
    """A file of a model, of weights or not, with something changed."""
    change = {GGUF: gguf_file, "model.safetensors": safetensors_file}.get(name)
    if change is not None:
        return change(original, rng)
    document = json.loads(original) if name == "config.json" else {}
    if QUANTISATION not in document or rng.random() < 0.4:
        return mutate(name, original, rng)
    part = mutate(QUANTISATION, json.dumps(document[QUANTISATION]).encode(), rng)
    with suppress(ValueError, RecursionError):
        return json.dumps(document | {QUANTISATION: json.loads(part)}).encode()
    return part


def place_of(folder: Path) -> str:
    """What a command is given: a folder, or the GGUF file in it."""
    return str(folder / GGUF if (folder / GGUF).exists() else folder)


def files_of(base: Path) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The files of a model that are mutated, and how often each."""
    if (base / GGUF).exists():
        return (GGUF,), (1,)
    return (FILES, WEIGHTS) if (base / SHARD).exists() else (("config.json", "model.safetensors"), (1, 1))


@contextmanager
def case_folder(base: Path, seed: int, case: int) -> Iterator[tuple[Path, str, str]]:
    """A folder with one mutated file, the file's name and the command to give it to."""
    rng = random.Random(f"{seed}/{case}")  # noqa: S311 - cases, no secrets
    name = rng.choices(*files_of(base))[0]
    command = RARE if rng.random() < 0.06 else rng.choice(USUAL)
    if name == "chat_template.jinja" and command == RARE:
        command = "chat"
    place = base.parent / f"case-{case}"
    shutil.rmtree(place, ignore_errors=True)  # of a worker that crashed
    place.mkdir()
    for file in base.iterdir():
        if file.name != name:
            os.link(file, place / file.name)
    (place / name).write_bytes(mutated(name, (base / name).read_bytes(), rng))
    try:
        yield place, name, command
    finally:
        shutil.rmtree(place, ignore_errors=True)


def call(words: list[str], scratch: Path, told: str = "E poi?\n") -> tuple[int, str, str]:
    """Run the command line in this process with real files as its streams; returns exit code, stdout and stderr."""
    from hotset.cli.app import app
    from hotset.cli.ending import run_and_report

    paths = [scratch / name for name in ("stdin", "stdout", "stderr")]
    paths[0].write_text(told)
    with _streams(paths):
        try:
            code = run_and_report(lambda: app(words, standalone_mode=False, prog_name="hotset"))
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
    return code, *(path.read_bytes().decode("utf-8", "replace") for path in paths[1:])


@contextmanager
def _streams(paths: list[Path]) -> Iterator[None]:
    """Let the three standard streams be files, for libraries that write to them past Python, too."""
    before, kept = (sys.stdin, sys.stdout, sys.stderr), [os.dup(number) for number in range(3)]
    files = [path.open(mode) for path, mode in zip(paths, "rww", strict=True)]
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
    sys.stdin, sys.stdout, sys.stderr = files  # type: ignore[assignment]
    try:
        yield
    finally:
        for file in files:
            file.close()
        for number, old in enumerate(kept):
            os.dup2(old, number)
            os.close(old)
        sys.stdin, sys.stdout, sys.stderr = before


def judge(code: int, stdout: str, stderr: str) -> str | None:
    """What is wrong with how a command ended, if anything."""
    lines = [line for line in stderr.splitlines() if line.strip() and not line.startswith("note:")]
    if "Traceback" in stderr or "panicked" in stderr:
        return "traceback"
    if code not in (0, 2):
        return f"exit code {code}"
    if code == 2 and (len(lines) != 1 or not lines[0].startswith("error: ")):
        return f"{len(lines)} lines on stderr"
    if (code == 2 and stdout.strip()) or "kwarg" in stdout:
        return "a library's words on stdout"
    if any(not letter.isprintable() for line in stderr.splitlines() for letter in line):
        return "control characters on stderr"
    return None


def work(base: Path, seed: int) -> None:
    """The worker: read numbers of cases from stdin, answer each with a line of JSON."""
    asked, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    scratch = base.parent
    first = _intact(base, scratch)
    _limit_memory()
    for line in asked:
        case = int(line)
        if case < 0:
            answers.write(json.dumps({"intact": _intact(base, scratch) == first}) + "\n")
        else:
            with case_folder(base, seed, case) as (place, name, command):
                code, out, err = call([command, place_of(place), *COMMANDS[command]], scratch)
            outcome = Outcome(case, name, command, code, out[-2000:], err[-4000:], judge(code, out, err))
            answers.write(json.dumps(asdict(outcome)) + "\n")
        answers.flush()


def _intact(base: Path, scratch: Path) -> str:
    code, out, err = call(["run", place_of(base), *COMMANDS["run"]], scratch)
    if code != 0:
        raise SystemExit(f"the intact model does not run: {err}")
    return out


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_MEMORY_BYTES,) * 2)


class Worker:
    """A worker process, started again after a hang or a crash."""

    def __init__(self, base: Path, seed: int) -> None:
        self._words = [sys.executable, __file__, "--work", str(base), "--seed", str(seed)]
        self._process: subprocess.Popen[str] | None = None

    def ask(self, case: int) -> dict[str, Any] | str:
        """The answer of a case, or "hang" or "crash"."""
        import select

        if self._process is None:
            self._process = subprocess.Popen(self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        process = self._process
        with suppress(OSError):
            process.stdin.write(f"{case}\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        if not select.select([process.stdout], [], [], TIMEOUT_S)[0]:
            self.close()
            return "hang"
        line = process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            self.close()
            return f"crash {process.returncode}"
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def fuzz(base: Path, seed: int, cases: range, tell: Callable[[Outcome], None]) -> tuple[list[Outcome], Counter[str]]:
    """All cases, and how often the intact model was right in between."""
    worker, outcomes, intact = Worker(base, seed), [], Counter[str]()
    for case in cases:
        answer = worker.ask(case)
        if isinstance(answer, str):
            with case_folder(base, seed, case) as (_, name, command):
                outcome = Outcome(case, name, command, -1, fault=answer)
        else:
            outcome = Outcome(**answer)
        outcomes.append(outcome)
        tell(outcome)
        if case % 50 == 49:
            found = worker.ask(-1)
            intact["right" if isinstance(found, dict) and found["intact"] else "wrong"] += 1
    worker.close()
    return outcomes, intact


def document(outcomes: list[Outcome], intact: Counter[str], seed: int, model: str) -> dict[str, Any]:
    """The result as it is committed."""
    of = "" if model == REFERENCE else f" --model {model}"
    faults = Counter(outcome.fault for outcome in outcomes if outcome.fault)
    by_file = {
        name: dict(Counter(f"exit {o.code}" for o in outcomes if o.file == name))
        for name in sorted({o.file for o in outcomes})
    }
    return {
        "command": f"python benchmarks/trust/model_files.py{of} --count {len(outcomes)} --seed {seed}",
        "count": len(outcomes),
        "seed": seed,
        "commands": dict(Counter(o.command for o in outcomes)),
        "by_file": by_file,
        "distinct_messages": len({o.stderr.split(": ")[-1] for o in outcomes if o.code == 2}),
        "tracebacks": faults.get("traceback", 0),
        "hangs": faults.get("hang", 0),
        "crashes": sum(count for fault, count in faults.items() if fault.startswith("crash")),
        "other_faults": {
            fault: n for fault, n in faults.items() if fault not in ("traceback", "hang") and "crash" not in fault
        },
        "intact_model": dict(intact),
        "versions": {
            name: version(name) for name in ("hotset", "torch", "transformers", "tokenizers", "jinja2", "typer")
        },
        "python": platform.python_version(),
    }


def beside(found: dict[str, Any], model: str, out: Path) -> dict[str, Any]:
    """The result with those of other models, which are kept: of the reference model at the top, others below it."""
    earlier = json.loads(out.read_text()) if out.exists() else {}
    others = earlier.pop("models", {})
    if model == REFERENCE:
        return found | ({"models": others} if others else {})
    return earlier | {"models": others | {model: found}}


def main() -> None:
    """Parse, run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[REFERENCE, *QUANTISED, "gguf"], default=REFERENCE)
    parser.add_argument("--count", type=int, default=2500)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="write every outcome here, a line of JSON each")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        work(asked.work, asked.seed)
        return

    log = asked.log.open("a") if asked.log else None

    def tell(outcome: Outcome) -> None:
        if log:
            log.write(json.dumps(asdict(outcome)) + "\n")
            log.flush()
        if outcome.fault:
            print(outcome.case, outcome.file, outcome.command, outcome.fault, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        place, kind = Path(folder) / "base", asked.model
        base = base_folder(place) if kind == REFERENCE else quantised_folder(place, kind)
        outcomes, intact = fuzz(base, asked.seed, range(asked.first, asked.first + asked.count), tell)
    found = document(outcomes, intact, asked.seed, asked.model)
    print(json.dumps(found, indent=1))
    asked.out.write_text(json.dumps(beside(found, asked.model, asked.out), indent=1) + "\n")


if __name__ == "__main__":
    main()
