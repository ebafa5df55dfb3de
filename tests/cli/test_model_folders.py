"""A model's folder whose small files are odd, wrong or hostile works, or ends in one line and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from calls import FEW, PROMPT, call, model_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from hotset import reference

pytestmark = pytest.mark.filterwarnings("default")


def test_stop_strings_of_a_model_end_its_answers_as_in_transformers(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reference.path())
    stock = AutoModelForCausalLM.from_pretrained(reference.path(), dtype="auto")
    ids = tokenizer(PROMPT[1], return_tensors="pt")["input_ids"]
    plain = tokenizer.decode(stock.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :])
    stop = plain[9:12]
    said = stock.generate(ids, max_new_tokens=40, do_sample=False, stop_strings=[stop], tokenizer=tokenizer)
    text = tokenizer.decode(said[0, ids.shape[1] :])
    assert len(text) < len(plain)
    place = model_folder(tmp_path / "model", generation_config={"stop_strings": [stop]})
    words = ("--memory", "25%", "--max-new-tokens", "40", "--json")
    done = call("run", place, *PROMPT, "--no-chat", *words)
    assert json.loads(done.out)["text"] == text
    turns = json.loads(call("chat", place, "--no-chat", *words, told=f"{PROMPT[1]}\n".encode()).out)["turns"]
    assert turns[0]["text"] == text
    file = tmp_path / "prompts.txt"
    file.write_text(PROMPT[1])
    kept = call(
        "trace", "record", place, "--prompts", file, "-o", tmp_path / "t", "--no-chat", "--max-new-tokens", 40, "--json"
    )
    assert json.loads(kept.out)["decode_tokens"] == said.shape[1] - ids.shape[1] - 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"repetition_penalty": -1.0}, "generation_config.json"),
        ({"eos_token_id": "x"}, "generation_config.json"),
        ({"exponential_decay_length_penalty": "x"}, "generation_config.json"),
        ({"stop_strings": [5]}, "generation_config.json"),
        ({"cache_implementation": "\x1b[31mred"}, "cannot"),
    ],
)
def test_generation_settings_that_cannot_work_are_told(tmp_path: Path, values: Any, words: str) -> None:
    place = model_folder(tmp_path / "model", generation_config=values)
    assert words in call("run", place, *PROMPT, *FEW).error
    assert call("chat", place, *FEW, told=b"ciao\n").error


def test_generation_settings_of_other_modes_do_not_matter(tmp_path: Path) -> None:
    odd = {"num_beams": 4, "num_return_sequences": 3, "return_dict_in_generate": True, "max_length": 3}
    place = model_folder(tmp_path / "model", generation_config=odd)
    assert call("run", place, *PROMPT, *FEW).out == call("run", *PROMPT, *FEW).out
    file = tmp_path / "prompts.txt"
    file.write_text("uno\ndue\n")
    record = ("--prompts", file, "--max-new-tokens", 3, "--batch", 2, "-o", tmp_path / "t")
    assert call("trace", "record", place, *record).code == 0


def test_tokens_beyond_the_embedding_are_told_before_they_are_read(tmp_path: Path) -> None:
    place = model_folder(tmp_path / "model")
    file = place / "tokenizer.json"
    document = json.loads(file.read_text())
    vocabulary = document["model"]["vocab"]
    document["model"]["vocab"] = {word: 9000 + id_ if id_ > 300 else id_ for word, id_ in vocabulary.items()}
    file.write_text(json.dumps(document))
    said = call("run", place, *PROMPT, *FEW).error
    assert "and the model 8,192 tokens" in said
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Il mercato\n")
    assert "8,192 tokens" in call("trace", "record", place, "--prompts", prompts, "-o", tmp_path / "t").error


@pytest.mark.parametrize("damage", ["missing", "broken", "empty", "binary"])
def test_a_tokenizer_that_is_missing_or_broken_is_told(tmp_path: Path, damage: str) -> None:
    place = model_folder(tmp_path / "model")
    file = place / "tokenizer.json"
    if damage == "missing":
        file.unlink()
        (place / "tokenizer_config.json").unlink()
    else:
        file.write_bytes({"broken": file.read_bytes()[:5000], "empty": b"", "binary": b"\xff\x00\x1b" * 99}[damage])
    assert "tokenizer" in call("run", place, *PROMPT, *FEW).error


@pytest.mark.parametrize("words", [("--json",), ()])
def test_words_that_a_library_prints_do_not_reach_stdout(
    tmp_path: Path, words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    place = model_folder(tmp_path / "model")
    odd = {"content": "<|endoftext|>", "\x1b[31mred": 1}
    (place / "special_tokens_map.json").write_text(json.dumps({"bos_token": odd, "unk_token": odd}))
    done = call("run", place, *PROMPT, *FEW, *words)
    assert done.code == 0, done
    assert capfd.readouterr().out == ""  # past Python; what hotset says is in done.out


@pytest.mark.parametrize(
    "template", ["{{1/0}}", "{% if false %}x{% endif %}", "{{ 'x' * 10**10 }}", "{{ raise_exception('\x1b[2Jno') }}"]
)
def test_a_chat_template_that_does_not_work_is_told(tmp_path: Path, template: str) -> None:
    place = model_folder(tmp_path / "model")
    (place / "chat_template.jinja").write_text(template)
    assert "--no-chat" in call("run", place, *PROMPT, *FEW).error
    assert "--no-chat" in call("chat", place, *FEW, told=b"ciao\n").error
    assert call("run", place, *PROMPT, *FEW, "--no-chat").code == 0


@pytest.mark.parametrize(
    ("key", "number"),
    [("hidden_size", 10**9), ("num_hidden_layers", 10**9), ("num_local_experts", 2**31), ("vocab_size", 10**12)],
)
def test_sizes_far_beyond_the_checkpoint_are_refused_before_they_are_built(
    tmp_path: Path, key: str, number: int
) -> None:
    place = model_folder(tmp_path / "model", config={key: number})
    assert f"{key} = {number:,}" in call("run", place, *PROMPT, *FEW).error
    shown = call("doctor", place)
    assert f"{key} = {number:,}" in " ".join(shown.out.split())
    assert f"{key} = {number:,}" in call("pack", place, "-o", tmp_path / "packed").error


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    place = model_folder(tmp_path / "model", config={"hidden_size": 512})
    assert call("run", place, *PROMPT, *FEW).error


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_hidden_layers": 2}, "holds model.layers.2."),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0, and a layer has 64 experts"),
        ({"num_experts_per_tok": 65}, "num_experts_per_tok = 65, and a layer has 64 experts"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}}, "rope_theta = inf"),
        ({"quantization_config": "bitsandbytes"}, "has 'bitsandbytes' as its quantization_config"),
        ({"quantization_config": [1, 2]}, "has [1, 2] as its quantization_config"),
    ],
)
def test_values_that_no_model_computes_with_are_named(tmp_path: Path, config: Any, words: str) -> None:
    place = model_folder(tmp_path / "model", config=config)
    assert words in call("run", place, *PROMPT, *FEW).error
    assert words in call("pack", place, "-o", tmp_path / "packed").error
    assert not (tmp_path / "packed").exists()


def test_a_traceback_is_shown_if_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = model_folder(tmp_path / "model", generation_config={"repetition_penalty": -1.0})
    assert "HOTSET_DEBUG=1" in call("run", place, *PROMPT, *FEW).error
    monkeypatch.setenv("HOTSET_DEBUG", "1")
    done = call("run", place, *PROMPT, *FEW)
    assert done.code == 2
    assert "Traceback" in done.err
    assert done.err.splitlines()[-1].startswith("error: cannot generate")
