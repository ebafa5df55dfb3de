"""Experts in a plain list, as a model's own code has them, on a GPU: what the model says itself, at every size."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
CODE = Path(__file__).parents[1] / "families"
sys.path[:0] = [str(Path(__file__).parents[1] / "formats"), str(CODE)]

from arctic.configuration_arctic import ArcticConfig  # noqa: E402
from arctic.modeling_arctic import ArcticForCausalLM  # noqa: E402
from format_runs import PROMPTS, answer, served  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
SETTINGS = [("100%", "off", "host"), ("50%", "auto", "host"), ("4 slots", "off", "host")]
"""The code of the model's blocks asks which tokens an expert has, so that the host drives."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that brings its code along."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("HOTSET_TUNE", "0")
    torch.manual_seed(0)
    target = tmp_path / "model"
    ArcticForCausalLM(ArcticConfig()).save_pretrained(target)
    for name in ("configuration_arctic.py", "modeling_arctic.py"):
        shutil.copy(CODE / "arctic" / name, target / name)
    classes = {
        "AutoConfig": "configuration_arctic.ArcticConfig", "AutoModelForCausalLM": "modeling_arctic.ArcticForCausalLM",
    }  # fmt: skip
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"auto_map": classes}))
    return target


def test_a_list_of_experts_says_what_the_model_says(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    stock: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    expected = {name: answer(stock.to("cuda").eval(), prompt) for name, prompt in PROMPTS.items()}
    first = None
    for setting in SETTINGS:
        found = served(folder, torch.float32, setting, 0, trust_remote_code=True)
        for name, (text, logits) in expected.items():
            assert found[name][0] == text, (setting, name)
            assert torch.allclose(found[name][1], logits, atol=1e-4 * float(logits.abs().max())), (setting, name)
            assert first is None or torch.equal(first[name][1], found[name][1]), (setting, name)
        first = found
