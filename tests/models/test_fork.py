"""A forked process refuses to run its parent's model in one line, owns nothing of it, and harms nothing by ending."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
if not hasattr(os, "fork"):
    pytest.skip("this system has no fork", allow_module_level=True)

FAMILIES = Path(__file__).parent.parent / "families"

BEGIN = """
import multiprocessing, os, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
here = Path(sys.argv[2])
import torch
torch.set_num_threads(1)
import tiny_models as tiny
import hotset
from hotset.errors import HotsetError
from hotset.profile import Profile

name = "qwen3_moe"
kinds = dict(memory="50%", learn=str(here / "learnt.safetensors"))
model = hotset.attach(tiny.make(name), spill=here / "spill", **kinds)
given = tiny.inputs(name, model)
expected = tiny.logits(model, given)

def tries():
    calls = [
        lambda: model(**given),
        lambda: model.generate(given["input_ids"], max_new_tokens=2),
        lambda: model.base_model(**given),
        lambda: model.hotset.stats(),
        lambda: model.hotset.pin([(0, 0)]),
        lambda: model.hotset.save_profile(here / "child.safetensors"),
        lambda: model.hotset.trace(here / "child-trace.safetensors"),
        lambda: hotset.detach(model),
    ]
    for number, call in enumerate(calls):
        try:
            call()
        except HotsetError as error:
            assert "before the process forked" in str(error) and "\\n" not in str(error), error
        else:
            raise SystemExit(f"call {number} was not refused")

def wait(pid):
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

def still_works():
    assert len(list((here / "spill").iterdir())) == 1
    assert torch.equal(tiny.logits(model, given), expected)
"""

CASES = """
# a child that runs into refusals and ends
pid = os.fork()
if pid == 0:
    tries()
    sys.exit(0)
wait(pid)
still_works()

# a child that closes and forgets the model
pid = os.fork()
if pid == 0:
    model.hotset.close()
    del model
    import gc; gc.collect()
    sys.exit(0)
wait(pid)
still_works()

# a child of multiprocessing
child = multiprocessing.get_context("fork").Process(target=tries)
child.start(); child.join()
assert child.exitcode == 0
still_works()

# a fork while the lock is held, in a recording
import threading
with model.hotset.trace(here / "trace.safetensors"):
    tiny.logits(model, given)
    taken, done = threading.Event(), threading.Event()
    def hold():
        with model.hotset.engine.paused():
            taken.set(); done.wait()
    holder = threading.Thread(target=hold); holder.start(); taken.wait()
    pid = os.fork()
    if pid == 0:
        (here / "trace.safetensors").unlink(missing_ok=True)
        tries()
        model.hotset.close()
        sys.exit(0)
    done.set(); holder.join()
    wait(pid)
    assert not (here / "trace.safetensors").exists()
assert (here / "trace.safetensors").exists()
still_works()
"""

END = """
tokens = sum(model.hotset.stats()[phase]["pass_tokens"] for phase in ("prefill", "decode"))
model.hotset.close()
assert list((here / "spill").iterdir()) == []
assert not (here / "child.safetensors").exists() and not (here / "child-trace.safetensors").exists()
counted = Profile.load(here / "learnt.safetensors").tokens.sum()
assert counted == tokens, (counted, tokens)
"""


WHOLE = """
# a child runs a model whose experts all fit
tiny.save(name, here)
model = hotset.load(sys.argv[2], memory="100%", dtype=torch.float32)
model.hotset.observe()
given = tiny.inputs(name, model)
expected = tiny.logits(model, given)
pid = os.fork()
if pid == 0:
    assert torch.equal(tiny.logits(model, given), expected)
    model.hotset.close()
    sys.exit(0)
wait(pid)
print("right")
"""


def test_a_child_refuses_and_owns_nothing(tmp_path: Path) -> None:
    (tmp_path / "spill").mkdir()
    script = BEGIN + CASES + END + WHOLE  # one process: most of the time goes into imports
    done = subprocess.run(
        [sys.executable, "-c", script, str(FAMILIES), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
