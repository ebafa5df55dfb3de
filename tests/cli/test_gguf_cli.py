"""GGUF files on the command line: run, recorded, examined and packed, and what is wrong with one in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

import gguf_models  # noqa: E402
from calls import FEW, PROMPT, call  # noqa: E402

from hotset import reference  # noqa: E402

SOURCE = Path(reference.path())


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return gguf_models.from_folder(SOURCE, folder / "ref.gguf", gguf_models.matrices_as("Q8_0"))


def test_a_file_runs(file: Path) -> None:
    words = (*FEW, *PROMPT, "--dtype", "float32", "--json")
    ended = call("run", file, *words)
    assert ended.code == 0, ended.err
    text = json.loads(ended.out)["text"]
    assert json.loads(call("run", file, "--experts", "dense", *words).out)["text"] == text
    assert json.loads(call("run", file.parent, *words).out)["text"] == text


def test_a_file_is_recorded_examined_and_packed(file: Path, tmp_path: Path) -> None:
    named = f"{file.parent}:{file.name}"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Il mercato\n")
    ended = call("trace", "record", named, "--prompts", prompts, "-o", tmp_path / "t.safetensors", *FEW)
    assert ended.code == 0, ended.err
    found = json.loads(call("doctor", named, "--json").out)["model"]
    assert found["expert_bytes"] == 28672  # of 26,112 bytes of blocks, by pages
    packed = call("pack", named, "-o", tmp_path / "packed", "--json")
    assert packed.code == 0, packed.err
    ran = [json.loads(call("run", place, *FEW, *PROMPT, "--json").out)["text"] for place in (file, tmp_path / "packed")]
    assert ran[0] == ran[1]


def test_a_profile_of_the_model_fits_its_file(file: Path) -> None:
    """Its routers are plain numbers, so that the file is of the same model."""
    from hotset.models.fingerprint import fingerprint_of_folder

    assert fingerprint_of_folder(file) == fingerprint_of_folder(SOURCE)


def rewritten(tmp_path: Path, change: Any) -> Path:
    """The file with other keys or tensors."""
    keys, tensors = gguf_models.keys_of(SOURCE, "qwen3moe"), gguf_models.tensors_of(SOURCE)
    change(keys, tensors)
    choose = gguf_models.matrices_as("Q8_0")
    return gguf_models.write(tmp_path / "bad.gguf", tensors, keys, choose, tokenizer=SOURCE)


def removed(name: str) -> Any:
    return lambda _, tensors: tensors.pop(name)


def stated(name: str, value: object) -> Any:
    return lambda keys, _: keys.update({f"qwen3moe.{name}": value})


FAULTS = {
    "layers": (stated("block_count", 1 << 31), "layers"),
    "no layers": (stated("block_count", "many"), "layers"),
    "width": (stated("embedding_length", 1 << 30), "hidden_size"),
    "fewer layers than tensors say": (stated("block_count", 9), "blk|model.layers.8"),
    "experts": (stated("expert_count", 65), "experts"),
    "heads": (stated("attention.head_count", 0), ""),
    "heads in words": (stated("attention.head_count", "two"), ""),
    "rotations": (stated("rope.scaling.type", "longrope"), "longrope"),
    "no experts' matrix": (removed("blk.3.ffn_up_exps.weight"), "gate_up_proj|ffn_gate_exps"),
    "no norm": (removed("blk.3.attn_norm.weight"), "input_layernorm"),
    "no embedding": (removed("token_embd.weight"), ""),
    "no router": (removed("blk.0.ffn_gate_inp.weight"), "mlp.gate"),
    "more layers than are counted": (stated("block_count", 2), r"holds blk\.2\.\S+, of layer 2 .* counts 2 layers"),
    "no experts per token": (stated("expert_used_count", 0), r"qwen3moe\.expert_used_count = 0, .* 1 to 64"),
    "too many experts per token": (stated("expert_used_count", 65), r"qwen3moe\.expert_used_count = 65, .* 1 to 64"),
    "rotations by no number": (stated("rope.freq_base", float("nan")), r"qwen3moe\.rope\.freq_base = nan"),
    "norms by no number": (
        stated("attention.layer_norm_rms_epsilon", float("inf")),
        r"qwen3moe\.attention\.layer_norm_rms_epsilon = inf",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_said_in_a_line(name: str, tmp_path: Path) -> None:
    import re

    change, words = FAULTS[name]
    error = call("run", rewritten(tmp_path, change), *FEW, *PROMPT).error
    assert re.search(words, error), error


def lied(data: bytes, pattern: str, kind: int) -> bytes:
    """A file whose header gives some tensors another type: by the names that match, and the number of the type."""
    import re
    import struct

    changed = bytearray(data)
    for found in re.finditer(pattern.encode(), data):
        at = found.end() + 4 + 8 * struct.unpack_from("<I", data, found.end())[0]
        struct.pack_into("<I", changed, at, kind)
    assert changed != data
    return bytes(changed)


@pytest.mark.parametrize(
    ("pattern", "kind", "words"),
    [
        (r"blk\.\d\.ffn_\w+_exps\.weight", 2, "'blk.0.ffn_down_exps.weight' of Q4_0"),
        (r"blk\.3\.ffn_up_exps\.weight", 2, "'blk.3.ffn_up_exps.weight' of Q4_0"),
        (r"blk\.0\.attn_q\.weight", 2, "'blk.0.attn_q.weight' of Q4_0"),
        (r"blk\.0\.ffn_gate_inp\.weight", 1, "'blk.0.ffn_gate_inp.weight' of F16"),
    ],
)
def test_a_header_that_lies_about_types_is_refused(
    pattern: str, kind: int, words: str, file: Path, tmp_path: Path
) -> None:
    (tmp_path / "m.gguf").write_bytes(lied(file.read_bytes(), pattern, kind))
    error = call("run", tmp_path / "m.gguf", *FEW, *PROMPT).error
    assert words in error
    assert "belong to no tensor" in error


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    tensors, keys = gguf_models.tensors_of(SOURCE), gguf_models.keys_of(SOURCE, "deepseek2")
    file = gguf_models.write(
        tmp_path / "a.gguf", tensors, keys, gguf_models.matrices_as("Q8_0"), architecture="deepseek2"
    )  # fmt: skip
    error = call("run", file, *FEW, *PROMPT).error
    assert "'deepseek2'" in error
    assert "gpt-oss, minimax-m2, qwen2moe" in error
    for name in [name for name in tensors if "_exps" in name]:
        del tensors[name]
    file = gguf_models.write(tmp_path / "b.gguf", tensors, {}, gguf_models.matrices_as("Q8_0"), architecture="llama")
    assert "no experts" in call("doctor", file).out + call("run", file, *FEW, *PROMPT).error


def test_a_file_of_the_hub_s_cache(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All shards are found where the hub's client has put them."""
    from huggingface_hub import constants

    first = gguf_models.from_folder(SOURCE, tmp_path / "m.gguf", gguf_models.matrices_as("Q8_0"), shards=2)
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    for shard in tmp_path.glob("m-*.gguf"):
        shard.rename(snapshot / shard.name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ended = call("run", f"org/name:{first.name}", *FEW, *PROMPT, "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["text"] == json.loads(call("run", file, *FEW, *PROMPT, "--json").out)["text"]


def test_places_that_are_none(file: Path, tmp_path: Path) -> None:
    assert "there is no file" in call("run", tmp_path / "x.gguf", *PROMPT).error
    assert f"it has {file.name}" in call("run", f"{file.parent}:x.gguf", *PROMPT).error
    (tmp_path / "y.gguf").write_bytes(file.read_bytes()[:-100])
    assert "truncated" in call("run", tmp_path / "y.gguf", *PROMPT).error
    (tmp_path / "z.gguf").write_bytes(b"nothing")
    assert "GGUF" in call("run", tmp_path / "z.gguf", *PROMPT).error
    assert "y.gguf, z.gguf" in call("run", tmp_path, *PROMPT).error
