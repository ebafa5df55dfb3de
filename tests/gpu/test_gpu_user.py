"""hotset as a person would use it on a machine with a GPU: the commands, a terminal, the prompt at once after loading.

The model is the reference model with wider experts; every text in float32 is stock's.
"""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hotset import reference  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
PROMPT = "La storia della città di Roma"
TOKENS = 48
WIDTH = 1024
PATIENCE_S = 180.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.inflate(WIDTH, tmp_path_factory.mktemp("gpu") / "inflated")


@pytest.fixture(scope="module")
def stock(folder: Path) -> Any:
    """What transformers answers to a conversation, in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="grouped_mm")
    model = model.to("cuda")

    def answer(*turns: str, tokens: int = TOKENS) -> str:
        messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        given = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to("cuda")
        out = model.generate(**given, max_new_tokens=tokens, do_sample=False)
        return str(tokenizer.decode(out[0, given["input_ids"].shape[1] :], skip_special_tokens=True))

    return answer


def hotset(*words: Any, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command of hotset as a process."""
    command = [sys.executable, "-W", "ignore", "-m", "hotset", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def run(folder: Path, *words: Any) -> dict[str, Any]:
    words = ("run", folder, "-p", PROMPT, "--dtype", "float32", "--max-new-tokens", TOKENS, "--json", *words)
    found: dict[str, Any] = json.loads(hotset(*words).stdout)
    return found


@pytest.mark.parametrize("memory", ["12.5%", "25%", "50%", "100%"])
def test_run_says_what_stock_says_at_every_size(folder: Path, stock: Any, memory: str) -> None:
    found = run(folder, "--memory", memory)
    assert found["text"] == stock(PROMPT)
    assert (found["engine"] == "stock") == (memory == "100%")
    if memory != "100%":
        stats = found["stats"]
        assert stats["hits"] + stats["misses"] == stats["asked"]


@pytest.mark.parametrize("engine", ["host", "device"])
def test_run_with_either_driver(folder: Path, stock: Any, engine: str) -> None:
    assert run(folder, "--memory", "25%", "--engine", engine)["text"] == stock(PROMPT)


def test_run_with_half_of_the_experts_in_ram_and_the_disk_behind(folder: Path, stock: Any) -> None:
    found = run(folder, "--memory", "12.5%", "--host-memory", "50%")
    assert found["text"] == stock(PROMPT)
    assert found["driven_by"] == "host"


def test_a_packed_model_says_the_same(folder: Path, stock: Any, tmp_path: Path) -> None:
    hotset("pack", folder, "-o", tmp_path / "packed")
    hotset("pack", tmp_path / "packed", "--verify")
    assert run(tmp_path / "packed", "--memory", "25%")["text"] == stock(PROMPT)


def test_what_is_learnt_warms_the_next_start(folder: Path, stock: Any, tmp_path: Path) -> None:
    profile = tmp_path / "italian.safetensors"
    assert run(folder, "--memory", "25%", "--learn", profile)["text"] == stock(PROMPT)
    assert "italian" in hotset("profile", "show", profile).stdout
    found = run(folder, "--memory", "25%", "--profile", profile, "--learn", profile)
    assert found["text"] == stock(PROMPT)
    assert found["stats"]["background_bytes"] > 0


def test_a_recording_replays_to_the_same_hits(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("La storia di Roma\nint main(void) {\nDas Wetter in Berlin\n", encoding="utf-8")
    out = tmp_path / "t.safetensors"
    words = ("--prompts", prompts, "-o", out, "--memory", "25%", "--new-tokens", 24, "--json")
    found = json.loads(hotset("trace", "record", folder, *words).stdout)
    assert found["requests"] == 3
    replayed = json.loads(hotset("simulate", out, "-p", "blend", "-b", "25%", "--fit", 0, "--json").stdout)
    rows = {row["phase"]: row for row in replayed["rows"] if row["policy"] == "blend"}
    for phase in ("prefill", "decode"):
        live = found["stats"][phase]
        assert (rows[phase]["hits"], rows[phase]["misses"]) == (live["hits"], live["misses"])


class Terminal:
    """A command of hotset at a terminal of its own."""

    def __init__(self, *words: Any) -> None:
        self.child, self.screen = pty.fork()
        if not self.child:
            os.environ["TERM"] = "dumb"
            os.execv(sys.executable, [sys.executable, "-W", "ignore", "-m", "hotset", *map(str, words)])  # noqa: S606
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode())

    def wait_for(self, wanted: str, after: int = 0) -> None:
        """Read until something has appeared on the screen behind a place."""
        deadline = time.monotonic() + PATIENCE_S
        while wanted not in self.text[after:]:
            assert time.monotonic() < deadline, f"no {wanted!r} in {self.text!r}"
            ready, _, _ = select.select([self.screen], [], [], 1.0)
            if ready:
                try:
                    self.text += os.read(self.screen, 1 << 16).decode(errors="replace").replace("\r\n", "\n")
                except OSError:
                    pytest.fail(f"it ended without {wanted!r}: {self.text!r}")

    def end(self) -> int:
        """The exit code, once all that is left to say was said."""
        while True:
            try:
                if not os.read(self.screen, 1 << 16):
                    break
            except OSError:
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])


def test_a_chat_at_a_terminal_goes_on_after_ctrl_c(folder: Path, stock: Any) -> None:
    words = ("--memory", "25%", "--dtype", "float32")
    terminal = Terminal("chat", folder, *words, "--max-new-tokens", 2000)
    terminal.wait_for("> ")
    terminal.type(f"{PROMPT}\n")
    first = stock(PROMPT)
    terminal.wait_for(first[:20])  # the answer has begun
    os.kill(terminal.child, signal.SIGINT)
    terminal.wait_for("\n> ", after=len(terminal.text) - 40)
    terminal.type("/reset\n")
    terminal.wait_for("> ", after=len(terminal.text))
    at = len(terminal.text)
    terminal.type(f"{PROMPT}\n")
    terminal.wait_for(first, after=at)  # what stock says, from its first word on
    os.kill(terminal.child, signal.SIGINT)
    terminal.wait_for("\n> ", after=len(terminal.text) - 40)
    terminal.type("/exit\n")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text


def test_ctrl_c_in_the_middle_of_a_run_ends_in_order(folder: Path) -> None:
    for wait in (b"", b"x"):  # while it loads or reads the prompt, and once text has come
        command = [sys.executable, "-W", "ignore", "-m", "hotset", "run", str(folder), "--memory", "25%", "-p", PROMPT]
        child = subprocess.Popen(
            [*command, "--max-new-tokens", "3000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        assert child.stdout is not None
        assert child.stderr is not None
        if wait:
            child.stdout.read(1)
        else:
            time.sleep(4)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=PATIENCE_S)
        assert child.returncode == 130, errors
        assert b"Traceback" not in errors
