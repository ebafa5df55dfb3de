"""Compiled code that cannot be kept, or is damaged, costs a line and some time, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hotset

PACKAGE = Path(hotset.__file__).parent
NOTE = "compiled code cannot be kept"

CHILD = """
import numpy as np
from hotset.compiling import keep_compiled
import module
assert module.twice(21) == 42 and module.twice(2.5) == 5.0
assert module.thrice(3) == 9
print("worked")
"""
MODULE = """
from hotset.compiling import keep_compiled

@keep_compiled(nogil=True)
def twice(x):
    return x + x

@keep_compiled(nogil=True)
def thrice(x):
    return x + twice(x)
"""


def run_child(folder: Path, home: Path, code: str = CHILD, **options: Any) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds the module in a folder, and hotset where it is now."""
    known = {key: value for key, value in os.environ.items() if not key.startswith(("NUMBA", "XDG"))}
    environment = known | {
        "HOME": str(home),
        "PYTHONPATH": f"{folder}{os.pathsep}{PACKAGE.parent}",
        "PYTHONDONTWRITEBYTECODE": "1",
        **options.pop("env", {}),
    }
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, **options
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package folder of ours, and beside it a home."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "module.py").write_text(MODULE)
    (tmp_path / "home").mkdir()
    return folder


def nowhere(package: Path, home: Path) -> None:
    """Have neither folder take a file: for the superuser, by files where folders have to be."""
    (package / "__pycache__").write_text("")
    (home / ".cache").write_text("")


def test_code_is_kept_where_it_can_be(package: Path, tmp_path: Path) -> None:
    for _ in range(2):
        done = run_child(package, tmp_path / "home")
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "worked", "")
    assert len(list((package / "__pycache__").glob("module.twice*.nbc"))) == 2


def test_no_folder_to_write_to_is_said_once_and_all_works(package: Path, tmp_path: Path) -> None:
    nowhere(package, tmp_path / "home")
    done = run_child(package, tmp_path / "home")
    assert (done.returncode, done.stdout.strip()) == (0, "worked"), done.stderr
    assert done.stderr.count(NOTE) == 1
    assert len(done.stderr.splitlines()) == 1
    file = tmp_path / "file"
    file.write_text("")  # as a folder of another user, which root could write to
    told = run_child(package, tmp_path / "home", env={"NUMBA_CACHE_DIR": str(file / "folder")}).stderr
    assert f"NUMBA_CACHE_DIR, {file / 'folder'}, cannot be written to" in told


def test_a_damaged_file_is_compiled_anew(package: Path, tmp_path: Path) -> None:
    run_child(package, tmp_path / "home")
    for path in (package / "__pycache__").glob("module.*.nb[ci]"):
        path.write_bytes(path.read_bytes()[:40])
    done = run_child(package, tmp_path / "home")
    assert (done.returncode, done.stdout.strip()) == (0, "worked"), done.stderr


def test_a_full_disk_is_said_once_and_all_works(package: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a disk of its own cannot be mounted here")
    try:
        done = run_child(package, tmp_path / "home", env={"NUMBA_CACHE_DIR": str(disk)})
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert (done.returncode, done.stdout.strip()) == (0, "worked"), done.stderr
    assert done.stderr.count(NOTE) == 1
    assert "No space left" in done.stderr


REPLAY = """
from hotset.cache import Controller, SlotPlan
from hotset.policies import parse
from hotset.trace.synth import SynthConfig, synthesise
trace = synthesise(SynthConfig(layers=2, experts=8, top_k=2, requests=2, new_tokens=8))
print(len(Controller(SlotPlan(trace.shape, 8), parse("lru")).replay(trace.events()).misses))
"""
READ_ONLY = """
for folder in "$1" "$2"; do
    mount --bind "$folder" "$folder" && mount -o remount,bind,ro "$folder" || exit 77
done
shift 2
exec "$@"
"""


def test_a_container_whose_folders_are_read_only_replays_and_says_so_once(tmp_path: Path) -> None:
    copy, home = tmp_path / "site", tmp_path / "home"
    shutil.copytree(PACKAGE, copy / "hotset", ignore=shutil.ignore_patterns("__pycache__", "model"))
    home.mkdir()
    if shutil.which("unshare") is None:
        pytest.skip("mounts of a process of its own cannot be made here")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", str(copy), str(home), sys.executable, "-c", REPLAY],
        env={"HOME": str(home), "PYTHONPATH": str(copy), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("mounts of a process of its own cannot be made here")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 1
    assert done.stderr.count(NOTE) == 1


CALLBACKS = """
import ctypes
from numba import njit
from hotset import compiling

@njit
def first(x):
    return x + 1

@njit
def second(x):
    return x + 2

import numpy as np
from hotset.formats import _vector_memory as m

def kernel_of(function, by):
    def kernel(address):
        m.put_float32(address, np.float32(function(m.int64_at(address)) * by))
    return compiling.keep_callback(kernel)

place = np.array([20], np.int64)
found = []
for function, by in ((first, 2), (second, 2), (first, 3)):
    place[0] = 20
    address = kernel_of(function, by)
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)(place.ctypes.data)
    found.append(int(place.view(np.float32)[0]))
assert found == [42, 44, 63], found
print(sum(one._cache_hits for one in compiling._callbacks))
"""


def test_kernels_that_differ_in_what_they_hold_are_kept_apart(package: Path) -> None:
    """By the functions and the numbers of a closure; in the next process all three are found."""
    (package / "callbacks.py").write_text(CALLBACKS)
    hits = []
    for _ in range(2):
        done = run_child(package, package.parent / "home", "import callbacks")
        assert done.returncode == 0, done.stderr
        hits.append(int(done.stdout.split()[-1]))
    assert hits == [0, 3]


ONLY_KEPT = """
from hotset.compiling import NotKeptError, can_be_kept, only_kept
import module
try:
    with only_kept():
        module.twice(21)
    print("kept")
except NotKeptError:
    print("not kept", can_be_kept(), module.twice(21))
"""


def test_it_can_be_asked_whether_code_is_kept(package: Path) -> None:
    home = package.parent / "home"
    assert run_child(package, home, ONLY_KEPT).stdout == "not kept True 42\n"
    assert run_child(package, home, ONLY_KEPT).stdout == "kept\n"


AHEAD = """
import json, sys
from pathlib import Path
from hotset import ahead, compiling
from hotset.generation import Sampling, TextModel, encode_prompt, generate
from hotset.options import RunOptions

loaded, load = [], compiling._Kept.load_overload

def note(self, *words):
    loaded.append(self._py_func.__qualname__)
    return load(self, *words)

def answer(text_model):
    generate(text_model, encode_prompt(text_model, "Il mercato del"), Sampling(max_new_tokens=20))
    text_model.stats()

def compiled(parts):
    list(ahead.compile_parts(ahead.missing(parts)))
    return parts

def told(parts):
    later = list(loaded)
    loaded.clear()
    compiling._Kept.load_overload = load
    print(json.dumps({"parts": parts, "missing": ahead.missing(parts), "later": later}))

compiling._Kept.load_overload = note
with TextModel.load(RunOptions()) as text_model:
    answer(text_model)
told([])

parts = compiled(ahead.parts_of("blend"))
profile = Path(sys.argv[1]) / "mine.safetensors"
with TextModel.load(RunOptions(memory="25%", learn=profile)) as text_model:
    compiling._Kept.load_overload = note
    answer(text_model)
    told(parts)

parts = compiled(ahead.parts_of("blend", warm=True))
compiling._Kept.load_overload = note
with TextModel.load(RunOptions(memory="25%", profile=profile)) as text_model:
    answer(text_model)
told(parts)
"""


def test_what_is_compiled_ahead_is_all_that_an_answer_needs(tmp_path: Path) -> None:
    """With all experts in memory nothing is; one process, in which no other test has loaded any."""
    words = [sys.executable, "-W", "ignore", "-c", AHEAD, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    whole, cold, warm = (json.loads(line) for line in done.stdout.splitlines()[-3:])
    assert whole["later"] == []
    assert sorted(cold["parts"]) == [["forecast", "gate"], ["policy", "blend"], ["shadow", ""], ["trial", ""]]
    assert cold["missing"] == cold["later"] == []
    assert ["warm", "blend"] in warm["parts"]
    assert warm["missing"] == warm["later"] == []


REPLAYS = """
import json
from hotset import ahead, compiling, reference
from hotset.analysis.caching import CacheQuestion, measure_caching
from hotset.analysis.planner.hits import replay_hits
from hotset.sim import Sweep, simulate
from hotset.sim.curve import lru_curve
from hotset.sim.forecasting import evaluate
from hotset.sim.link import Link
from hotset.sim.sweep import replays_of
from hotset.trace.combine import interleave

trace = reference.trace("it").with_expert_bytes(1024).select([0, 1, 2])
sweep = Sweep(policies=["lru"], budgets=["25%"], link=Link(1e9, 1e-3), prefetch="previous")
replays = replays_of({"it": trace}, sweep)._replace(judged=("previous",))
parts = ahead.parts_of_replays(replays, curve=True, walk=True)
for part in ahead.compile_parts(ahead.missing(parts)):
    pass
missing = ahead.missing(parts)
loaded, load = [], compiling._Kept.load_overload

def note(self, *words):
    loaded.append(self._py_func.__qualname__)
    return load(self, *words)

compiling._Kept.load_overload = note
before_s = compiling.compile_seconds()
simulate({"it": trace}, sweep)
simulate({"it": interleave(trace, 2)}, sweep)
lru_curve(trace.events())
evaluate(trace, ["previous"], (1, 2))
measure_caching(trace, CacheQuestion(policies=["lru"]))
replay_hits(trace, ["lru"])
kinds = sorted(part.kind for part in parts)
print(json.dumps([kinds, missing, loaded, compiling.compile_seconds() - before_s]))
"""
KINDS = ["curve", "judge", "prefetch", "replay", "replay", "walk"]


def test_what_is_compiled_ahead_is_all_that_replays_need() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", REPLAYS], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [KINDS, [], [], 0.0]


ONE_MISSING = """
import json
from hotset import ahead
from hotset.sim.sweep import Replays

parts = ahead.parts_of_replays(Replays(("lru",)), walk=True)
print(json.dumps([part.kind for part in ahead.missing(parts)]))
ahead.compile_part(ahead.Part("walk"))
"""


def test_parts_that_are_on_disk_are_not_missing(tmp_path: Path) -> None:
    known = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", ONE_MISSING],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        known.append(json.loads(done.stdout.splitlines()[-1]))
    assert known == [["replay", "walk"], ["replay"]]


def test_every_policy_and_forecast_has_its_parts() -> None:
    from hotset import ahead, forecasts, policies
    from hotset.analysis import caching
    from hotset.analysis.planner import hits

    parts = ahead.all_parts()
    assert len(parts) == len(set(parts))
    assert {name for kind, name in parts if kind == "replay"} == set(policies.names())
    assert {name for kind, name in parts if kind in ("judge", "prefetch")} == set(forecasts.names())
    assert set(ahead.usual_parts()) <= set(parts)
    assert set(ahead.USUAL_POLICIES) == {*caching.POLICIES, *hits.POLICIES, hits.LEARNT, hits.BOUND}
    assert "belady" not in {name for kind, name in parts if kind == "policy"}


def test_a_policy_of_a_file_is_a_part_that_another_process_knows() -> None:
    from hotset import ahead
    from hotset.plugins import resolve
    from hotset.sim.sweep import Replays

    file = Path(__file__).parents[1] / "examples" / "own_policy.py"
    name = resolve(str(file))
    assert ahead.parts_of_replays(Replays((name,))) == [("replay", str(file.resolve()))]
    assert ahead.parts_of(name, "off")[0] == ("policy", str(file.resolve()))
    ahead.compile_part(ahead.Part("replay", str(file)))


def test_studies_compile_what_their_traces_can_be_replayed_with() -> None:
    from dataclasses import replace

    from hotset import reference
    from hotset.sim import studies

    trace = reference.trace("it")
    without = replace(trace, predictions=None)
    for name in studies.names():
        study = studies.find(name)
        assert study.replays.policies, name
        assert "gate" not in (*study.replays_on({"it": without}).judged, *study.replays_on({"it": without}).prefetched)
    assert "gate" in studies.find("shift").replays_on({"a": without, "b": trace}).judged
