"""SIGTERM and SIGKILL at random moments of `run --learn` and `trace record`: files are always valid.

    python benchmarks/trust/kills.py --count 50 --seed 1

Half of the signals of each kind strike a run that learns, half a recording. SIGTERM ends with 143 (-15 before Python
has begun, 0 if the work was done), without a traceback, and leave at least what was saved before; SIGKILL leaves whole
files only: of what was learnt at least the last save, of a recording all but the last minute.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

from hotset.errors import HotsetError  # noqa: E402
from hotset.generation.checkpoints import AT_LEAST_EVERY_S, part_of  # noqa: E402
from hotset.profile import Profile  # noqa: E402
from hotset.trace import Trace  # noqa: E402

from common import publish  # noqa: E402

HANGS_S = 240.0
TERMINATED = 143


def main() -> None:
    """Strike, look at what is left, and publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="signals of each kind, half in each command")
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args()
    bench = Bench(random.Random(wanted.seed))  # noqa: S311
    began = time.monotonic()
    for number in range(2 * wanted.count):
        kill = signal.SIGKILL if number % 2 else signal.SIGTERM
        (bench.learn if number % 4 < 2 else bench.record)(kill)
        if number % 10 == 9:
            print(f"{number + 1}: {dict(bench.counts)}, {len(bench.failures)} failures", flush=True)
    publish(
        "trust_kills",
        {
            "seed": wanted.seed, "torch": version("torch"), "transformers": version("transformers"),
            "signals": 2 * wanted.count, "outcomes": dict(sorted(bench.counts.items())),
            "invalid_files_losses_or_tracebacks": len(bench.failures), "failures": bench.failures,
            "most_seconds_lost_by_kill": round(bench.most_lost_s, 2), "seconds": round(time.monotonic() - began),
        },
    )  # fmt: skip
    sys.exit(bool(bench.failures))


class Bench:
    """Runs commands, ends them, and counts what came of it."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.counts: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []
        self.most_lost_s = 0.0

    def learn(self, kill: signal.Signals) -> None:
        """A run that learns, and saves what it learnt every half second."""
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "p.safetensors"
            words = ["run", "-p", "Il mare", "--max-new-tokens", "100000", "--memory", "25%", "--learn", str(path)]
            process = start([*words, "--learn-every", "0.01"])
            self._wait(process, path)
            before = self._tokens(path, "learn", kill)
            code, errors = end(process, kill)
            self._judge("learn", kill, code, errors)
            kept = self._tokens(path, "learn", kill)
            if kept < before:
                self._fail("learn", kill, f"{kept} of {before} tokens are left")
            self._nothing_half(Path(name), {path.name, f".{path.name}.lock"}, "learn", kill)

    def record(self, kill: signal.Signals) -> None:
        """A recording of many short prompts."""
        with tempfile.TemporaryDirectory() as name:
            prompts, out = Path(name) / "prompts.txt", Path(name) / "t.safetensors"
            prompts.write_text("Il mare\nint main\nThe sea\n" * 2000)
            words = ["trace", "record", "--prompts", str(prompts), "-o", str(out), "--memory", "25%"]
            process = start([*words, "--max-new-tokens", str(self.chance.choice([2, 8, 500]))])
            answered = self._wait(process, part_of(out))
            before = self._requests(part_of(out), "record", kill) if answered else 0
            code, errors = end(process, kill)
            self._judge("record", kill, code, errors)
            if kill == signal.SIGTERM:
                self._after_term(out, before, code, errors)
            else:
                self._after_kill(out, before)
            self._nothing_half(Path(name), {prompts.name, out.name, part_of(out).name}, "record", kill)

    def _after_term(self, out: Path, before: int, code: int, errors: str) -> None:
        kept = self._requests(out, "record", signal.SIGTERM)
        if kept < before or (before and code != TERMINATED):
            self._fail("record", signal.SIGTERM, f"{kept} of {before} requests are left ({code}): {errors}")
        if part_of(out).exists():
            self._fail("record", signal.SIGTERM, "the part file is left")

    def _after_kill(self, out: Path, before: int) -> None:
        part = part_of(out)
        kept = max(self._requests(part, "record", signal.SIGKILL), self._requests(out, "record", signal.SIGKILL))
        if kept < before:
            self._fail("record", signal.SIGKILL, f"{kept} of {before} requests are left")
        if part.exists():
            lost_s = time.time() - part.stat().st_mtime
            self.most_lost_s = max(self.most_lost_s, lost_s)
            if lost_s > AT_LEAST_EVERY_S + 10:  # the time it takes to notice
                self._fail("record", signal.SIGKILL, f"the last checkpoint is {lost_s:.0f} s old")

    def _wait(self, process: subprocess.Popen[str], path: Path) -> bool:
        """Wait for a random moment: in the start, or some time after the first save; true if that was there."""
        if self.chance.random() < 0.2:
            time.sleep(self.chance.uniform(0.0, 8.0))
            return path.exists()
        until = time.monotonic() + HANGS_S
        while not path.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(self.chance.choice([0.0, self.chance.uniform(0, 0.1), self.chance.uniform(0, 3)]))
        return path.exists()

    def _judge(self, what: str, kill: signal.Signals, code: int, errors: str) -> None:
        expected = (-signal.SIGKILL,) if kill == signal.SIGKILL else (TERMINATED, -signal.SIGTERM, 0)
        self.counts[f"{what} {kill.name} ended with {code}"] += 1
        if code not in expected or "Traceback" in errors:
            self._fail(what, kill, f"exit code {code}: {errors[-400:]}")

    def _tokens(self, path: Path, what: str, kill: signal.Signals) -> int:
        try:
            return int(Profile.load(path).tokens.sum()) if path.exists() else 0
        except HotsetError as error:
            self._fail(what, kill, str(error))
            return 0

    def _requests(self, path: Path, what: str, kill: signal.Signals) -> int:
        try:
            return Trace.load(path).requests if path.exists() else 0
        except HotsetError as error:
            self._fail(what, kill, str(error))
            return 0

    def _nothing_half(self, folder: Path, expected: set[str], what: str, kill: signal.Signals) -> None:
        """Besides what was asked for there is nothing, but for the private folder of a writer that was killed."""
        left = {name for name in os.listdir(folder) if not (kill == signal.SIGKILL and name.endswith(".part"))}
        if not left <= expected:
            self._fail(what, kill, f"left behind: {sorted(left - expected)}")

    def _fail(self, what: str, kill: signal.Signals, why: str) -> None:
        self.failures.append({"command": what, "signal": kill.name, "why": why})
        print(self.failures[-1], flush=True)


def start(words: list[str]) -> subprocess.Popen[str]:
    """A command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "hotset", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def end(process: subprocess.Popen[str], kill: signal.Signals) -> tuple[int, str]:
    """Send the signal and wait; returns the exit code and what was said."""
    process.send_signal(kill)
    try:
        _, errors = process.communicate(timeout=HANGS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return 124, "it hangs"
    return process.returncode, errors


if __name__ == "__main__":
    main()
