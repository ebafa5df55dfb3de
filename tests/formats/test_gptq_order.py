"""GPTQ: the group of an input is what `g_idx` says, whatever the config says of `desc_act`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

from published import Published, gptq  # noqa: E402
from test_published import INPUTS, OUTPUTS, assert_bits, encoded, numbers_of, refusal  # noqa: E402
from test_published_models import QUANTISED, encoded_models, plain, run  # noqa: E402, F401

from hotset.errors import HotsetError  # noqa: E402
from hotset.formats.gptq import Gptq  # noqa: E402
from hotset.models.packing import pack  # noqa: E402

SAID = {"missing": None, "false": False, "true": True}


def checkpoint(said: str, *, moved: bool, bits: int = 4, second: bool = False) -> Published:
    """Groups of 16 inputs in some order, in a checkpoint whose config says something of it."""
    kind = gptq(bits, 16, second=second, by_index=moved)
    config = {key: value for key, value in kind.config.items() if key != "desc_act"}
    return replace(kind, config=config if SAID[said] is None else config | {"desc_act": SAID[said]})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("said", SAID)
def test_every_input_has_the_scale_of_its_own_group(said: str, moved: bool, dtype: str) -> None:
    for bits, second in ((4, False), (4, True), (8, False)):
        kind = checkpoint(said, moved=moved, bits=bits, second=second)
        tensors = kind.encode(torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1)))
        in_order = torch.equal(tensors["g_idx"], torch.arange(INPUTS, dtype=torch.int32) // 16)
        assert in_order != moved
        chosen, parts = encoded(kind, tensors, dtype)
        assert isinstance(chosen, Gptq)
        assert chosen.by_index == (moved or said == "true")  # inputs in order have faster products
        assert_bits(numbers_of(chosen, parts), kind.decode(tensors), dtype)


def test_one_input_in_another_group_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotset.formats.gptq.CHUNK", 7)
    kind = checkpoint("false", moved=False)
    for place in (0, 6, 7, INPUTS - 1):
        tensors = kind.encode(torch.randn(OUTPUTS, INPUTS))
        tensors["g_idx"][place] = 3
        chosen, parts = encoded(kind, tensors, "float32")
        assert chosen.by_index
        assert_bits(numbers_of(chosen, parts), kind.decode(tensors), "float32")
    tensors["g_idx"] = torch.arange(INPUTS, dtype=torch.int32) // 16
    assert not encoded(kind, tensors, "float32")[0].by_index


def test_without_the_groups_of_inputs() -> None:
    tensors = checkpoint("true", moved=True).encode(torch.randn(OUTPUTS, INPUTS))
    del tensors["g_idx"]
    assert "says desc_act, and there is no g_idx" in refusal(checkpoint("true", moved=True), tensors)
    for said in ("missing", "false"):
        assert not encoded(checkpoint(said, moved=False), tensors, "float32")[0].by_index


@pytest.mark.parametrize("wrong", [torch.zeros(INPUTS, dtype=torch.int64), torch.zeros(INPUTS - 1, dtype=torch.int32)])
@pytest.mark.parametrize("said", SAID)
def test_groups_of_another_type_or_length(said: str, wrong: Any) -> None:
    kind = checkpoint(said, moved=False)
    tensors = kind.encode(torch.randn(OUTPUTS, INPUTS)) | {"g_idx": wrong}
    assert refusal(kind, tensors).startswith("m.g_idx is ")


@pytest.mark.parametrize("said", ["missing", "false"])
def test_a_model_whose_config_does_not_tell(said: str, plain: Path, tmp_path: Path) -> None:  # noqa: F811
    """Experts in any order, and some in order among them, as those are that calibration never reached."""
    moved, ordered = checkpoint(said, moved=True), checkpoint(said, moved=False)

    def kind_of(key: str, mixed: bool) -> Published:
        return ordered if mixed and ".experts.2." in key else moved

    for mixed in (False, True):
        folder = encoded_models.rewrite(
            plain, tmp_path / f"encoded-{mixed}", lambda k, m, mixed=mixed: kind_of(k, mixed).named(k, m), QUANTISED
        )
        encoded_models.edit_config(folder, quantization_config=moved.config)
        decoded = encoded_models.rewrite(
            plain, tmp_path / f"decoded-{mixed}", lambda k, m, mixed=mixed: {k: kind_of(k, mixed).back(m)}, QUANTISED
        )
        expected = run(decoded, dtype=torch.float32)
        assert torch.equal(run(folder, dtype=torch.float32, experts="dense"), expected)
        torch.testing.assert_close(run(folder, dtype=torch.float32), expected, rtol=1e-5, atol=1e-5)
        pack(folder, tmp_path / f"pack-{mixed}", dtype="float32")
        index = json.loads((tmp_path / f"pack-{mixed}" / "experts.json").read_text())
        specs = {matrix["format"] for layer in index["layers"] for matrix in layer.get("matrices", [])}
        assert specs if not mixed else not specs  # a slot can take any expert, so that those are expanded
        assert all("ordered=" in spec for spec in specs)


def test_a_group_that_is_none_is_refused_where_the_config_says_in_order(plain: Path, tmp_path: Path) -> None:  # noqa: F811
    kind = checkpoint("false", moved=False)

    def encode(key: str, matrix: Any) -> Any:
        tensors = kind.named(key, matrix)
        for name, tensor in tensors.items():
            if name.endswith("g_idx"):
                tensor[0] = 99
        return tensors

    folder = encoded_models.rewrite(plain, tmp_path / "encoded", encode, QUANTISED)
    encoded_models.edit_config(folder, quantization_config=kind.config)
    for experts in ("auto", "dense"):
        with pytest.raises(HotsetError, match=r"model\.layers\.0\.\S+\.g_idx: .* an input is of group 99") as caught:
            pack(folder, tmp_path / experts, dtype="float32", experts=experts)
        assert "\n" not in str(caught.value)
