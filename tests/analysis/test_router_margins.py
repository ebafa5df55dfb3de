"""The margins of routers' choices as a model runs, against the stock router's logits, and counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402

from hotset.analysis.router_margins import RouterMargins  # noqa: E402
from hotset.analysis.saliency_kernels import SaliencyRecorder  # noqa: E402
from hotset.models.load import load_model  # noqa: E402
from hotset.options import RunOptions  # noqa: E402

QUICK = RunOptions(device="cpu", memory="50%", engine="host", prefetch="off")
BIN = 2 ** (1 / 20)


def exercise(model: Any) -> None:
    """A batch of prompts, then tokens by themselves."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model(input_ids=torch.randint(3, 60, (2, 24), generator=random), use_cache=False)
        for token in torch.randint(3, 60, (12, 1, 1), generator=random):
            model(input_ids=token, use_cache=False)


def margins_of(folder: Path) -> tuple[RouterMargins, list[str]]:
    recorder = SaliencyRecorder(margins=True)
    with tiny.quiet():
        model = load_model(str(folder), QUICK, None, kernels=recorder.kernels).eval()
    recorder.begin(model, {})
    exercise(model)
    names = [moe_layer.name for moe_layer in model.hotset.moe_layers]
    model.hotset.close()
    assert recorder.margins is not None
    return recorder.margins.margins, names


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe"])
def test_margins_are_those_of_the_stock_router(name: str, tmp_path: Path) -> None:
    tiny.save(name, tmp_path)
    found, names = margins_of(tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    slow: list[list[float]] = [[] for _ in names]
    for layer, module in enumerate(names):
        gate = stock.get_submodule(module.removesuffix(".experts")).gate.weight.detach().double()

        def look(_: Any, args: Any, kwargs: Any, gate: Any = gate, margins: list[float] = slow[layer]) -> None:
            hidden, index = [*args, *kwargs.values()][:2]
            for row in hidden.reshape(-1, hidden.shape[-1]).double():
                ordered = (gate @ row).sort(descending=True).values
                margins.append(float(ordered[index.shape[1] - 1] - ordered[index.shape[1]]))

        stock.get_submodule(module).register_forward_pre_hook(look, with_kwargs=True)
    exercise(stock)
    assert found.wrong.tolist() == [0] * len(names)
    assert found.bins.sum(axis=1).tolist() == [2 * 24 + 12] * len(names)  # each token once, in however many parts
    expected = np.quantile(np.array(slow), (0.1, 0.5, 0.9), axis=1, method="inverted_cdf").T
    assert (found.quantiles() < expected * BIN).all()
    assert (found.quantiles() > expected / BIN).all()


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_routers_with_biases_and_corrections_are_understood(name: str, tmp_path: Path) -> None:
    tiny.save(name, tmp_path)
    found, _ = margins_of(tmp_path)
    assert found.wrong.sum() == 0
    assert np.isfinite(found.quantiles()).all()


def test_by_hand() -> None:
    found = RouterMargins.empty(3)

    def add(layer: int, *margins: float) -> None:
        scores = np.array([[-9, margin, 0, margin + 1] for margin in margins], np.float32)
        found.add(layer, scores, np.array([3, 1] * len(margins)), 2)

    add(0, *[0.5] * 2, *[4.0] * 7, 8.0)
    add(1, *[1.0] * 9, -1.0)
    assert found.wrong.tolist() == [0, 1, 0]
    assert found.quantiles()[0] == pytest.approx([0.5, 4, 4], rel=BIN - 1)
    assert np.isnan(found.quantiles()[1:]).all()  # a tenth chose otherwise, and nothing was seen
    add(2, 0.0, 1e-9, np.inf, 1e9)
    found.add(2, np.zeros((1, 4), np.float32), np.array([3, 4]), 2)  # a token that left a place empty
    assert found.bins[2].sum() == 4
    assert found.quantiles()[2, 1] < 2e-5
