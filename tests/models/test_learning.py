"""Learning from use on a live model: statistics that reconcile, profiles that warm, pins, and nothing lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import examples

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402

import hotset  # noqa: E402
from hotset import reference  # noqa: E402
from hotset.errors import BudgetError, HotsetError, ProfileError  # noqa: E402
from hotset.profile import Fingerprint, Profile  # noqa: E402
from hotset.trace import Phase  # noqa: E402

ITALIAN = ("La storia di Roma antica", "Il mercato del paese", "Per fare il pane")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def load(**options: Any) -> Any:
    return hotset.load(reference.path(), **({"memory": "25%", "dtype": torch.float32, "device": "cpu"} | options))


def say(model: Any, tokenizer: Any, text: str, tokens: int = 12) -> Any:
    given = tokenizer(text, return_tensors="pt")
    return model.generate(**given, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)


def learn(tokenizer: Any, path: Path, tokens: int, **options: Any) -> None:
    model = load(**options)
    for text in ITALIAN:
        say(model, tokenizer, text, tokens)
    model.hotset.save_profile(path)
    model.hotset.close()


@pytest.fixture(scope="module")
def italian(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A profile of three texts, learnt once."""
    path = tmp_path_factory.mktemp("learnt") / "italian.safetensors"
    learn(tokenizer, path, 40)
    return path.read_bytes()


@pytest.fixture
def learnt(italian: bytes, own_folder: None) -> Path:
    """Where that profile lies, under its name, in the folder of a test."""
    path: Path = hotset.profile.folder.locate("italian")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(italian)
    return path


def test_statistics_are_those_of_the_recorded_run(tokenizer: Any) -> None:
    model = load()
    with model.hotset.trace() as recorder:
        for text in ITALIAN:
            say(model, tokenizer, text)
    trace, statistics, stats = recorder.finish(), model.hotset.statistics(), model.hotset.stats()
    for phase in Phase:
        for layer in range(8):
            chosen = trace.experts[trace.phase == phase, layer]
            assert np.array_equal(statistics.uses[phase, layer], np.bincount(chosen.ravel(), minlength=64))
    assert statistics.hits.sum() == stats["hits"]
    assert statistics.misses.sum() == stats["misses"] == statistics.loads.sum()
    assert statistics.loaded_bytes.sum() == stats["loaded_bytes"]
    assert statistics.tokens.tolist() == [trace.count(Phase.PREFILL), trace.count(Phase.DECODE)]
    assert int(statistics.resident.sum()) == stats["resident"] == 128
    assert statistics.rate.sum(axis=1) == pytest.approx(np.full(8, 8.0))
    best = model.hotset.top(2, 3)
    assert [entry["rate"] for entry in best] == sorted(statistics.rate[2], reverse=True)[:3]
    model.hotset.close()


def test_requests_add_up_to_the_process(tokenizer: Any) -> None:
    model = load()
    for text in ITALIAN:
        say(model, tokenizer, text, 12)
    requests, stats = model.hotset.requests(), model.hotset.stats()
    model.hotset.close()
    assert [int(request.tokens[Phase.DECODE]) for request in requests] == [11, 11, 11]
    assert sum(request.counters.as_dict()["hits"] for request in requests) == stats["hits"]
    assert sum(request.loaded_bytes for request in requests) == stats["loaded_bytes"]
    assert sum(int(request.uses.sum()) for request in requests) == stats["tokens"] * 64


def test_resetting_forgets_no_request_and_no_statistics(tokenizer: Any) -> None:
    model = load()
    say(model, tokenizer, ITALIAN[0], 12)
    read = model.hotset.stats()["loaded_bytes"]
    model.hotset.reset_stats()
    assert model.hotset.stats()["hits"] == 0
    assert model.hotset.requests()[0].loaded_bytes == read
    assert model.hotset.statistics().misses.sum() > 0
    model.hotset.close()


def test_the_shadow_tells_what_lru_would_have_hit(tokenizer: Any) -> None:
    from hotset.cache.controller import Controller
    from hotset.policies import parse

    model = load()
    with model.hotset.trace() as recorder:
        for text in ITALIAN:
            say(model, tokenizer, text)
    gain, plan = model.hotset.stats()["gain"], model.hotset.engine.controller.plan
    model.hotset.close()
    lru = Controller(plan, parse("lru")).replay(recorder.finish().events()).counters
    assert gain["against"] == "lru"
    assert gain["against_hit_rate"] == pytest.approx(lru.hit_rate(Phase.DECODE))
    assert gain["saved_bytes"] == gain["hits"] * 49_152  # stored in half the size that float32 takes


@pytest.mark.usefixtures("learnt")
def test_a_profile_warms_the_next_start_and_leaves_the_text_alone(tokenizer: Any) -> None:
    cold, warm = load(), load(profile="italian")
    texts, rates = [], []
    for model in (cold, warm):
        assert model.hotset.wait_until_warm(60)
        texts.append(say(model, tokenizer, "La casa del nonno", 24))
        rates.append(model.hotset.stats())
        model.hotset.close()
    assert torch.equal(*texts)
    assert rates[1]["prefill"]["hit_rate"] > rates[0]["prefill"]["hit_rate"] + 0.2
    assert rates[1]["hit_rate"] > rates[0]["hit_rate"]
    assert rates[1]["background_bytes"] == 128 * 49_152
    assert rates[0]["background_bytes"] == 0


def test_a_profile_goes_on_where_it_ended(tokenizer: Any, learnt: Path) -> None:
    first = Profile.load(learnt)
    model = load(profile="italian")
    say(model, tokenizer, ITALIAN[0], 20)
    model.hotset.save_profile("italian")
    model.hotset.save_profile("italian")  # nothing new: nothing is counted twice
    model.hotset.close()
    second = Profile.load(learnt)
    assert (second.tokens - first.tokens)[Phase.DECODE] == 19
    assert second.created == first.created
    assert second.uses.sum() == pytest.approx(first.uses.sum() + 64 * (second.tokens - first.tokens).sum(), rel=0.02)
    assert len(second.history.spans) > len(first.history.spans)


def test_saving_what_was_loaded_gives_the_same_bytes(learnt: Path, tmp_path: Path) -> None:
    Profile.load(learnt).save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == learnt.read_bytes()


def test_overwriting_begins_anew_and_loses_nothing_if_nothing_was_used(tokenizer: Any, learnt: Path) -> None:
    before = learnt.read_bytes()
    model = load()
    with pytest.raises(HotsetError, match="run the model first"):
        model.hotset.save_profile("italian", overwrite=True)
    assert learnt.read_bytes() == before
    say(model, tokenizer, ITALIAN[0], 11)
    model.hotset.save_profile("italian", overwrite=True)
    model.hotset.close()
    assert Profile.load(learnt).tokens[Phase.DECODE] == 10


def test_a_policy_that_learns_nothing_leaves_what_another_learnt(tokenizer: Any, learnt: Path) -> None:
    before = Profile.load(learnt)
    learn(tokenizer, learnt, 8, policy="lru")
    after = Profile.load(learnt)
    assert after.policy == "blend"
    assert after.tokens.sum() > before.tokens.sum()
    assert all(np.array_equal(after.learnt[name], before.learnt[name]) for name in before.learnt)


def test_nothing_used_is_nothing_to_save() -> None:
    model = load()
    with pytest.raises(HotsetError, match="run the model first"):
        model.hotset.save_profile("nothing")
    model.hotset.close()


def test_a_profile_of_another_model_is_refused_by_name(learnt: Path, tmp_path: Path) -> None:
    tiny.save("qwen3_moe", tmp_path / "tiny")
    with tiny.quiet(), pytest.raises(ProfileError, match="8 x 64"):
        hotset.load(str(tmp_path / "tiny"), memory="50%", profile=str(learnt))


def test_a_fine_tune_is_foreign_and_may_be_allowed(learnt: Path) -> None:
    from dataclasses import replace

    known = Profile.load(learnt)
    replace(known, fingerprint=Fingerprint(known.fingerprint.architecture, "0" * 32)).save(learnt)
    with pytest.raises(ProfileError, match="--allow-foreign"):
        load(profile="italian")
    model = load(profile="italian", allow_foreign=True)
    assert model.hotset.wait_until_warm(60)
    model.hotset.close()
    replace(known, fingerprint=Fingerprint("MixtralForCausalLM", "0" * 32)).save(learnt)
    with pytest.raises(ProfileError, match="MixtralForCausalLM"):
        load(profile="italian", allow_foreign=True)


def test_the_fingerprint_is_of_the_weights_and_not_of_their_dtype(tmp_path: Path) -> None:
    from hotset.models.fingerprint import fingerprint_of_folder

    marks = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load(dtype=dtype)
        marks.append(model.hotset.fingerprint)
        model.hotset.close()
    assert marks[0] == marks[1] == fingerprint_of_folder(reference.path())
    tiny.save("qwen3_moe", tmp_path)
    with tiny.quiet():
        assert fingerprint_of_folder(tmp_path).digest != marks[0].digest


@pytest.mark.usefixtures("learnt")
def test_pins_are_the_hottest_and_a_starving_share_is_refused() -> None:
    model = load(profile="italian", pin="20%")
    assert model.hotset.wait_until_warm(60)
    heat = model.hotset.profile.hotness()
    pins = model.hotset.pins()
    assert len(pins) == 8 * 3  # of 16 slots a layer
    for layer, expert in pins:
        assert heat[layer, expert] >= np.sort(heat[layer])[-3]
    model.hotset.close()
    with pytest.raises(BudgetError, match="pin at most 8"):
        load(profile="italian", pin="60%")
    with pytest.raises(HotsetError, match="profile"):
        load(pin="20%")
    with pytest.raises(HotsetError, match="share"):
        load(profile="italian", pin="8GiB")


def test_a_model_that_all_fits_says_so_and_still_learns(tokenizer: Any) -> None:
    model = load(memory="100%", learn="whole")
    say(model, tokenizer, ITALIAN[0], 10)
    model.hotset.close()
    profile = Profile.load(hotset.profile.folder.locate("whole"))
    assert profile.tokens[Phase.DECODE] == 9
    assert profile.misses is not None
    assert not profile.misses.any()
    model = load(memory="100%", profile="whole")
    assert any("nothing to warm" in note for note in model.hotset.notes)
    with pytest.raises(HotsetError, match="in memory"):
        model.hotset.pin("10%")
    model.hotset.close()


def test_learning_saves_from_time_to_time_and_at_the_end(tokenizer: Any) -> None:
    model = load(learn="live", learn_every=0.05 / 60)
    path = hotset.profile.folder.locate("live")
    say(model, tokenizer, ITALIAN[0], 20)
    until = time.monotonic() + 20
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert path.exists()
    say(model, tokenizer, ITALIAN[1], 20)
    model.hotset.close()
    assert Profile.load(path).tokens[Phase.DECODE] == 38
    assert not [name for name in path.parent.iterdir() if name.suffix == ".part"]


def test_two_processes_may_learn_the_same_profile(tokenizer: Any) -> None:
    models = [load(learn="shared", learn_every=1000) for _ in range(2)]
    for model in models:
        say(model, tokenizer, ITALIAN[0], 11)
    threads = [threading.Thread(target=model.hotset.close) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Profile.load(hotset.profile.folder.locate("shared")).tokens[Phase.DECODE] == 20


def test_a_profile_that_breaks_meanwhile_is_left_alone_and_told(tokenizer: Any, learnt: Path) -> None:
    model = load(learn="italian", learn_every=1000)
    say(model, tokenizer, ITALIAN[0], 5)
    learnt.write_bytes(b"not a profile")
    model.hotset.close()
    assert learnt.read_bytes() == b"not a profile"
    assert any("could not be updated" in note for note in model.hotset.notes)


def test_a_refused_profile_gives_an_attached_model_its_experts_back(learnt: Path, tmp_path: Path) -> None:
    model = tiny.make("qwen3_moe")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ProfileError, match="8 x 64"):
        hotset.attach(model, memory="50%", profile=str(learnt), spill=tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not hasattr(model, "hotset")


def test_auto_begins_with_nextuse_on_a_cpu_and_may_switch(tokenizer: Any) -> None:
    model = load(policy="auto")
    say(model, tokenizer, ITALIAN[0], 10)
    stats = model.hotset.stats()
    assert stats["policy"] == "nextuse"
    assert "policy nextuse, by auto; lru takes over where it does better" in model.hotset.notes
    assert stats["gain"]["switches"] == []
    assert model.hotset.engine.monitor.comparison.switch
    model.hotset.close()


def test_marks_and_a_plot(tokenizer: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = load()
    model.hotset.mark("first words")
    say(model, tokenizer, ITALIAN[0], 20)
    model.hotset.mark("then more")
    say(model, tokenizer, ITALIAN[1], 20)
    model.hotset.plot(tmp_path / "heat.svg")
    assert model.hotset.plot() is not None
    marks = model.hotset.statistics().history.marks
    model.hotset.close()
    assert marks == ((0, "first words"), (19, "then more"))
    assert "then more" in (tmp_path / "heat.svg").read_text()


KILLED = """
    import sys, torch, hotset
    from hotset import reference
    torch.set_num_threads(1)
    model = hotset.load(reference.path(), memory="25%", learn=sys.argv[1], learn_every=0.02 / 60)
    ids = torch.tensor([[5, 900, 31]])
    print("ready", flush=True)
    while True:
        model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
"""


def tokens_in(path: Path) -> int:
    return int(Profile.load(path).tokens.sum()) if path.exists() else 0


def test_killing_a_learning_process_never_breaks_its_profile(tmp_path: Path) -> None:
    path = tmp_path / "killed.safetensors"
    random = np.random.default_rng(0)
    for _ in range(examples(2, 8)):
        before, until = tokens_in(path), time.monotonic() + 60
        command = [sys.executable, "-c", textwrap.dedent(KILLED), str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            while tokens_in(path) == before and time.monotonic() < until:  # every reading finds a whole profile
                time.sleep(0.01)
            time.sleep(0.2 * random.random())
            process.send_signal(signal.SIGKILL)
        assert tokens_in(path) > before
