import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from hotset.cli.trace_synth import synth
from hotset.errors import HotsetError
from hotset.trace import Phase, Trace
from hotset.trace.synth import SynthConfig, synthesise
from hotset.trace.synth_fit import measure

SMALL = SynthConfig(layers=4, experts=16, top_k=2, requests=12, prompt_tokens=8, new_tokens=40, topics=3)
RUNNER = CliRunner()


def stats(**changes: Any) -> dict[str, float]:
    base = replace(SMALL, layers=8, experts=32, top_k=4, requests=30, prompt_tokens=0, new_tokens=100)
    return measure(synthesise(replace(base, **changes)))


def command() -> typer.Typer:
    app = typer.Typer()
    app.command()(synth)
    return app


def run(*words: object) -> Any:
    return RUNNER.invoke(command(), [str(word) for word in words])


def test_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        synthesise(SMALL).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_another_seed_gives_another_trace() -> None:
    first, second = synthesise(SMALL), synthesise(replace(SMALL, seed=1))
    assert first.tokens != second.tokens or (first.experts != second.experts).any()


def test_routing_is_pinned() -> None:
    """A change of the numbers drawn would break every recorded seed, so it must be deliberate."""
    trace = synthesise(replace(SMALL, requests=1, prompt_tokens=0, layers=1))
    assert trace.experts[:4, 0].tolist() == [[2, 15], [8, 5], [15, 2], [6, 2]]


def test_a_knob_leaves_the_other_draws_alone() -> None:
    calm, skewed = synthesise(SMALL), synthesise(replace(SMALL, skew=2.0, drift=0.5))
    assert (calm.request == skewed.request).all()
    assert calm.labels == skewed.labels


def test_prompt_is_one_pass_and_each_new_token_another() -> None:
    trace = synthesise(SMALL)
    for request in range(trace.requests):
        own = trace.request == request
        prompt, new = (trace.step[own & (trace.phase == phase)] for phase in (Phase.PREFILL, Phase.DECODE))
        assert len(set(prompt.tolist())) == 1
        assert new.tolist() == list(range(prompt[0] + 1, prompt[0] + 1 + len(new)))


def test_no_prompt_means_no_prefill() -> None:
    trace = synthesise(replace(SMALL, prompt_tokens=0))
    assert trace.count(Phase.PREFILL) == 0
    assert trace.step.tolist() == list(range(trace.tokens))


def test_lengths_have_the_mean_asked_for() -> None:
    for requests in (1, 3, 500):
        trace = synthesise(replace(SMALL, requests=requests, prompt_tokens=16, new_tokens=64))
        assert trace.count(Phase.PREFILL) / requests == pytest.approx(16, rel=0.05)
        assert trace.count(Phase.DECODE) / requests == pytest.approx(64, rel=0.05)


def test_weights_fall_and_add_up_to_one() -> None:
    weights = synthesise(SMALL).weights
    assert weights is not None
    assert (np.diff(weights.astype(float), axis=2) <= 0).all()
    assert np.allclose(weights.astype(float).sum(axis=2), 1, atol=2e-3)


def test_meta_rebuilds_the_trace() -> None:
    trace = synthesise(SMALL)
    assert trace.meta["source"] == "synthetic"
    assert SynthConfig.from_dict(json.loads(trace.meta["config"])) == SMALL


def test_long_requests_do_not_depend_on_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = synthesise(SMALL)
    monkeypatch.setattr("hotset.trace.synth._BLOCK_VALUES", 7 * 4 * 16)
    assert (synthesise(SMALL).experts == whole.experts).all()


def test_top_k_of_all_experts_uses_all_of_them() -> None:
    trace = synthesise(replace(SMALL, experts=4, top_k=4))
    assert (np.sort(trace.experts, axis=2) == np.arange(4)).all()


@pytest.mark.parametrize(
    ("knob", "low", "high", "statistic", "sign"),
    [
        ("skew", 0.2, 1.5, "top_fifth", 1),
        ("skew", 0.2, 1.5, "entropy", -1),
        ("locality", 0.0, 0.8, "repeat_1", 1),
        ("slow", 0.0, 1.0, "repeat_4", 1),
        ("slow_tokens", 4.0, 64.0, "repeat_16", 1),
        ("noise", 0.5, 2.0, "repeat_64", -1),
        ("topic_strength", 0.0, 1.5, "cosine_requests", -1),
        ("topics", 2, 12, "cosine_requests", -1),
        ("topic_stay", 0.0, 0.95, "cosine_neighbours", 1),
        ("drift", 0.0, 0.5, "cosine_thirds", -1),
        ("switch", 0.0, 0.1, "cosine_halves", -1),
    ],
)
def test_knob_moves_its_statistic(knob: str, low: float, high: float, statistic: str, sign: int) -> None:
    before, after = (stats(**{knob: value})[statistic] for value in (low, high))
    assert sign * (after - before) > 0.02


def test_defaults_make_caching_interesting() -> None:
    found = measure(synthesise(SynthConfig()))
    assert 0.35 < found["repeat_1"] < 0.45
    assert 0.40 < found["top_fifth"] < 0.46
    assert found["cosine_requests"] < found["cosine_halves"] - 0.2


def test_requests_of_one_topic_are_alike() -> None:
    trace = synthesise(SynthConfig(requests=40, prompt_tokens=0, drift=0.0, layers=4))
    counts = np.zeros((40, 4 * 64))
    flat = trace.experts + 64 * np.arange(4, dtype=np.int16)[:, None]
    np.add.at(counts, (trace.request[:, None], flat.reshape(trace.tokens, -1)), 1)
    unit = counts / np.linalg.norm(counts, axis=1, keepdims=True)
    topic = np.array([label["topic"] for label in trace.labels])
    same = topic[:, None] == topic
    cosine = unit @ unit.T
    assert cosine[same].mean() > cosine[~same].mean() + 0.2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"locality": 1.5}, "locality must be a number from 0 to 1"),
        ({"skew": float("nan")}, "skew must be"),
        ({"noise": "much"}, "noise must be"),
        ({"requests": 0}, "requests must be a whole number from 1"),
        ({"topics": 2.5}, "topics must be a whole number"),
        ({"seed": True}, "seed must be"),
        ({"layers": "4"}, "layers of a model must be"),
        ({"expert_bytes": 1.5}, "expert_bytes must be"),
        ({"top_k": 99}, "top_k must be a whole number from 1 to 64"),
        ({"requests": 10**9}, "fewer requests"),
        ({"localty": 0.5}, '"localty" is not a parameter'),
    ],
)
def test_bad_configs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(HotsetError, match=message):
        SynthConfig.from_dict(change)


def test_command_writes_a_trace(tmp_path: Path) -> None:
    out = tmp_path / "t.safetensors"
    result = run("-o", out, "--layers", 2, "--requests", 3, "--expert-bytes", "1MiB")
    assert result.exit_code == 0, result.output
    trace = Trace.load(out)
    assert (trace.shape.layers, trace.requests, trace.shape.expert_bytes) == (2, 3, 1 << 20)


def test_command_reads_and_saves_configs(tmp_path: Path) -> None:
    config, saved = tmp_path / "in.json", tmp_path / "out.json"
    config.write_text(json.dumps(SMALL.to_dict()))
    result = run("-o", tmp_path / "t", "--config", config, "--save-config", saved, "--seed", 7, "--json")
    assert result.exit_code == 0, result.output
    wanted = replace(SMALL, seed=7).to_dict()
    assert json.loads(result.stdout)["config"] == wanted
    assert json.loads(saved.read_text()) == wanted


@pytest.mark.parametrize("text", ['{"sed": 1}', "[]", "{", None])
def test_command_refuses_bad_config_files(tmp_path: Path, text: str | None) -> None:
    config = tmp_path / "c.json"
    if text is not None:
        config.write_text(text)
    result = run("-o", tmp_path / "t", "--config", config)
    assert isinstance(result.exception, HotsetError)
    assert not (tmp_path / "t").exists()


def test_command_overwrites_only_when_forced(tmp_path: Path) -> None:
    out = tmp_path / "t"
    out.write_text("mine")
    assert isinstance(run("-o", out, "--requests", 1).exception, HotsetError)
    assert out.read_text() == "mine"
    assert run("-o", out, "--requests", 1, "--force").exit_code == 0


def test_command_takes_one_source_of_parameters(tmp_path: Path) -> None:
    result = run("-o", tmp_path / "t", "--config", "a", "--fit", "b")
    assert isinstance(result.exception, HotsetError)


def test_help_states_every_parameter_and_its_default() -> None:
    options = {option.name: option for option in typer.main.get_command(command()).params}
    for item in fields(SynthConfig):
        assert item.name in options
        if item.default is not None:
            assert f"Default: {item.default:g}." in str(getattr(options[item.name], "help", ""))
