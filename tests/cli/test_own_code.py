"""Code in a model's folder runs when --trust-remote-code asks for it, and otherwise never, whatever stdin says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models as tiny
from calls import Ended, call
from safetensors.torch import load_file, save_file

import hotset
from hotset import reference
from hotset.errors import ModelError
from hotset.models.packing import pack

pytestmark = pytest.mark.filterwarnings("default")

CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

with Path({marker!r}).open("a") as file:
    file.write("it ran ")

class OwnConfig(Qwen3MoeConfig):
    model_type = "own_moe"

class OwnModel(Qwen3MoeForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


class Case:
    """A model with code of its own that leaves a mark when it runs."""

    def __init__(self, folder: Path) -> None:
        self.model, self.marker = folder / "model", folder / "marker"
        own = tiny.make("qwen3_moe", vocab_size=2048)
        with tiny.quiet():
            own.save_pretrained(self.model)
        save_file(own.state_dict(), self.model / "model.safetensors", metadata={"format": "pt"})  # as "own_moe" has it
        config = json.loads((self.model / "config.json").read_text())
        classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
        self.write("config.json", config | {"model_type": "own_moe", "auto_map": classes})
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (self.model / name).write_bytes((reference.path() / name).read_bytes())
        (self.model / "own.py").write_text(CODE.format(marker=str(self.marker)))

    def write(self, name: str, document: dict[str, object]) -> None:
        (self.model / name).write_text(json.dumps(document))


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return Case(tmp_path)


def run_process(*words: str | Path) -> Ended:
    """As a process: what a model's code leaves in this one would hide whether it runs again."""
    command = [sys.executable, "-m", "hotset", *map(str, words)]
    done = subprocess.run(command, input="y\ny\ny\n", capture_output=True, text=True, check=False, env=os.environ)
    return Ended(done.returncode, done.stdout, done.stderr)


def run_here(*words: str | Path) -> Ended:
    return call(*words, told=b"y\ny\ny\n")


COMMANDS = {
    "run": ["run", "MODEL", "-p", "a", "--memory", "50%", "--max-new-tokens", "1"],
    "chat": ["chat", "MODEL", "--memory", "50%", "--max-new-tokens", "1"],
    "record": ["trace", "record", "MODEL", "--prompts", "reference:c", "-o", "OUT"],
    "pack": ["pack", "MODEL", "-o", "OUT"],
    "profile": ["profile", "make", "reference:c", "--model", "MODEL", "-o", "OUT"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_it_or_asks(command: str, case: Case, tmp_path: Path) -> None:
    places = {"MODEL": str(case.model), "OUT": str(tmp_path / "out")}
    start = run_process if command == "run" else run_here
    done = start(*[places.get(word, word) for word in COMMANDS[command]])
    assert not case.marker.exists()
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1
    assert "pass --trust-remote-code" in done.err
    assert "[y/N]" not in done.err


def test_doctor_finds_it_out_without_running_it(case: Case) -> None:
    done = run_here("doctor", case.model, "--json")
    assert not case.marker.exists()
    assert "pass --trust-remote-code" in json.loads(done.out)["model"]["unknown"]


def test_code_of_a_tokenizer_does_not_run_either(case: Case) -> None:
    config = json.loads((case.model / "config.json").read_text())
    del config["auto_map"]
    case.write("config.json", config | {"model_type": "qwen3_moe"})
    settings = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    case.write("tokenizer_config.json", settings)
    done = run_here(*[str(case.model) if word == "MODEL" else word for word in COMMANDS["run"]])
    assert not case.marker.exists()
    assert "[y/N]" not in done.err + done.out
    assert done.code == 0 or "--trust-remote-code" in done.err


def test_python_refuses_it_as_well(case: Case, tmp_path: Path) -> None:
    for work in (
        lambda: hotset.load(str(case.model), memory="50%"),
        lambda: pack(case.model, tmp_path / "pack"),
    ):
        with pytest.raises(ModelError, match="trust_remote_code=True"):
            work()
    assert not case.marker.exists()


def test_it_runs_when_asked_for(case: Case, tmp_path: Path) -> None:
    done = run_process(*[str(case.model) if w == "MODEL" else w for w in COMMANDS["run"]], "--trust-remote-code")
    assert done.code == 0, done.err
    assert case.marker.exists()
    case.marker.unlink()
    done = run_here("pack", case.model, "-o", tmp_path / "pack", "--trust-remote-code")
    assert done.code == 0, done.err
    assert case.marker.exists()
    assert (tmp_path / "pack/own.py").exists()
    assert load_file(tmp_path / "pack/model.safetensors")
