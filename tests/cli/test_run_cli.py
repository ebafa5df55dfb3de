"""`hotset run` as a person and as a script uses it, on the model that ships with hotset."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hotset import Trace, reference
from hotset.cli.app import app
from hotset.cli.summary import detail_line, summary_line
from hotset.errors import HotsetError
from hotset.options import RunOptions

pytestmark = pytest.mark.filterwarnings("default")

PROMPT = "Il mercato del"
FEW = ("--max-new-tokens", "12")
KEYS = {
    "text", "prompt_tokens", "new_tokens", "new_token_ids", "tokens_per_s", "prefill_s", "hit_rate", "bytes_per_token",
    "resident_bytes", "policy", "engine", "model", "memory", "stall_share", "stats", "finish",
}  # fmt: skip


def call(*words: str | Path, text: str | None = None) -> Any:
    done = CliRunner().invoke(app, [str(word) for word in words], input=text)
    if isinstance(done.exception, HotsetError):
        raise done.exception
    return done


def start(*words: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hotset", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def stock() -> Any:
    return AutoModelForCausalLM.from_pretrained(reference.path(), dtype="auto")


def greedy(stock: Any, tokenizer: Any, ids: torch.Tensor, tokens: int) -> str:
    out = stock.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("memory", ["10%", "auto"])
def test_the_text_is_that_of_stock_transformers(stock: Any, tokenizer: Any, memory: str) -> None:
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    done = call("run", "-p", PROMPT, "--no-chat", "--memory", memory, "--max-new-tokens", "24")
    assert done.exit_code == 0
    assert done.stdout.rstrip("\n") == greedy(stock, tokenizer, ids, 24).rstrip("\n")
    assert "tokens per second, the first after" in done.stderr
    assert "; greedy; " in done.stderr


def test_the_chat_template_is_used_where_there_is_one(stock: Any, tokenizer: Any) -> None:
    ids = tokenizer(PROMPT + "\n\n", return_tensors="pt")["input_ids"]
    done = call("run", "-p", PROMPT, "--memory", "25%", *FEW)
    assert done.stdout.rstrip("\n") == greedy(stock, tokenizer, ids, 12).rstrip("\n")


def test_json_is_one_document_with_the_promised_keys() -> None:
    done = call("run", "-p", PROMPT, "--memory", "25%", *FEW, "--json")
    document = json.loads(done.stdout)
    assert done.stderr == ""
    assert document.keys() >= KEYS
    assert document["new_tokens"] == len(document["new_token_ids"]) == 12
    assert document["model"] == "reference"
    assert (document["memory"], document["policy"], document["engine"]) == ("25%", "blend", "cpu")
    assert document["tokens_per_s"] > 0
    assert document["prefill_s"] > 0
    stats = document["stats"]
    assert stats["hits"] + stats["misses"] == stats["asked"]
    assert stats["decode"]["pass_tokens"] == 11
    assert document["decode_hit_rate"] == stats["decode"]["hit_rate"]


def test_sampling_repeats_with_its_seed() -> None:
    draws = [
        call("run", "-p", PROMPT, "--temperature", "1.5", "--top-p", "0.95", "--seed", seed, *FEW, "--json").stdout
        for seed in ("1", "1", "2")
    ]
    one, again, other = (json.loads(draw)["new_token_ids"] for draw in draws)
    assert one == again != other


def test_the_prompt_comes_from_a_file_or_stdin(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text(PROMPT)
    by_file = call("run", "--file", tmp_path / "p.txt", *FEW, "--json")
    by_pipe = call("run", "--file", "-", *FEW, "--json", text=PROMPT)
    assert json.loads(by_file.stdout)["text"] == json.loads(by_pipe.stdout)["text"]


@pytest.mark.parametrize("memory", ["25%", "auto"])
def test_a_trace_holds_every_token_that_was_put_in(tmp_path: Path, memory: str) -> None:
    out = tmp_path / "t.safetensors"
    document = json.loads(call("run", "-p", PROMPT, "--memory", memory, *FEW, "--trace", out, "--json").stdout)
    trace = Trace.load(out)
    assert trace.tokens == document["prompt_tokens"] + 11
    assert trace.meta["model"] == "reference"
    with pytest.raises(HotsetError, match="exists"):
        call("run", "-p", PROMPT, "--trace", out)


def damaged(folder: Path, name: str, content: str) -> Path:
    copy = folder / "model"
    shutil.copytree(reference.path(), copy)
    (copy / name).write_text(content)
    return copy


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/no/such/folder", "-p", "x"], "there is no folder"),
        (["no_such_model", "-p", "x"], "there is no folder"),
        ([__file__, "-p", "x"], "is a file"),
        ([str(Path(__file__).parent), "-p", "x"], "no config.json"),
        ([], "no prompt"),
        (["-p", " \n"], "prompt is empty"),
        (["-p", "x", "--file", "y"], "not both"),
        (["--file", "/no/such/file"], "cannot read"),
        (["-p", "x", "--memory", "much"], "cannot read the budget"),
        (["-p", "x", "--memory", "1e30GiB"], "cannot read the budget"),
        (["-p", "x", "--memory", "9" * 400 + "GiB"], "beyond any memory"),
        (["-p", "x", "--memory", "9" * 5000 + " slots"], "cannot read the budget"),
        (["-p", "x", "--memory=-8GiB"], "cannot read the budget"),
        (["-p", "x", "--memory", "nan%"], "cannot read the budget"),
        (["-p", "x", "--memory", "0%"], "must be more than 0 %"),
        (["-p", "x", "--host-memory", "inf"], "cannot read the budget"),
        (["-p", "x", "--memory", "2 slots"], "the smallest budget that works"),
        (["-p", "x", "--policy", "nobody"], "no policy is called"),
        (["-p", "x", "--policy", "belady"], "needs to know the future"),
        (["-p", "x", "--scope", "world"], "--scope is one of"),
        (["-p", "x", "--dtype", "int1"], "--dtype is one of"),
        (["-p", "x", "--engine", "steam"], '--engine is one of auto, host, device, not "steam"'),
        (["-p", "x", "--device", "abacus"], "no device is called"),
        pytest.param(
            ["-p", "x", "--device", "mps"],
            "no MPS device is here",
            marks=pytest.mark.skipif(torch.backends.mps.is_available(), reason="there is one"),
        ),
        (["-p", "x", "--device", "cpu", "--engine", "device"], "--engine device is for a CUDA GPU"),
        (["-p", "x " * 5000], "the model's context is 4,096"),
        (["-p", "x", "--trace", "/no/such/folder/t"], "there is no folder"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(HotsetError, match=message) as caught:
        call("run", *words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{oops", "cannot load the config"),
        ("config.json", "{}", "cannot load the config"),
        ("config.json", '{"model_type": "unheard_of"}', "does not know the architecture"),
        ("tokenizer.json", "{}", "cannot load the tokenizer"),
        ("tokenizer.json", "{oops", "cannot load the tokenizer"),
        ("chat_template.jinja", "{% for %}", "use --no-chat"),
        ("model.safetensors", "short", "model.safetensors"),
    ],
)
def test_a_damaged_model_is_one_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(HotsetError, match=message) as caught:
        call("run", damaged(tmp_path, name, content), "-p", "x")
    assert "\n" not in str(caught.value)


def test_a_hub_that_cannot_be_reached_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: (_ for _ in ()).throw(OSError("no network")))
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(HotsetError, match="hf download org/nothing"):
        call("run", "org/nothing", "-p", "x")


@pytest.mark.parametrize("words", [["run", "-p", "x"], ["chat"], ["trace", "record", "--prompts", "p", "-o", "t"]])
@pytest.mark.parametrize("engine", ["host", "device", "auto"])
def test_whoever_is_to_drive_is_handed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], engine: str
) -> None:
    asked: list[RunOptions] = []

    def load(_: str, options: RunOptions, __: Any, ___: Any) -> Any:
        asked.append(options)
        raise HotsetError("far enough")

    monkeypatch.setattr("hotset.models.load.load_model", load)
    monkeypatch.chdir(tmp_path)
    Path("p").write_text("Il mercato\n")
    with pytest.raises(HotsetError, match="far enough"):
        call(*words, "--engine", engine)
    assert asked[0].engine == engine


def test_the_summary_needs_no_glossary_and_the_rest_says_who_drove() -> None:
    stats = {"engine": "cuda", "resident_bytes": 1 << 20, "stall_share": 0.0, "decode": {"hit_rate": 0.5}}
    assert summary_line(5, 10.0, stats, "greedy", first_s=0.25) == (
        "5 tokens, 10.0 tokens per second, the first after 0.2 s; greedy; 1.00 MiB of experts in memory, "
        "hit rate 50.0 % (so many were there when they were needed)"
    )
    assert detail_line(stats | {"driven_by": "device"}).endswith("experts), driven by the device")
    assert detail_line(stats) == "0.0 % of the time stalled (waiting for experts)"


def test_an_error_has_no_traceback_and_exits_with_2() -> None:
    process = start("run", "-p", "x", "--memory", "much")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_ctrl_c_keeps_what_was_written() -> None:
    process = start("run", "-p", PROMPT, "--memory", "25%", "--max-new-tokens", "3000")
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 4)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert first
    assert out.endswith("\n")
    assert "Traceback" not in err
    assert "of experts in memory" in err


def test_the_staging_is_what_was_asked_for() -> None:
    done = call("run", "-p", "Ciao", "--memory", "25%", "--max-new-tokens", "1", "--staging", "7", "--json")
    assert json.loads(done.stdout)["stats"]["staging"] == 7
