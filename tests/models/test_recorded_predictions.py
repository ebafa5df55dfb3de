"""A recording can keep what the routers ahead make of each layer's input, so that forecasts replay offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from typer.testing import CliRunner  # noqa: E402

import hotset  # noqa: E402
from hotset import reference  # noqa: E402
from hotset.cli.app import app  # noqa: E402
from hotset.forecasts import parse  # noqa: E402
from hotset.models.routers import Routers  # noqa: E402
from hotset.sim.forecasting import evaluate  # noqa: E402
from hotset.trace import Trace  # noqa: E402
from hotset.trace.recorder import Recorder  # noqa: E402
from hotset.trace.trace import NONE  # noqa: E402

IDS = torch.tensor([[5, 900, 31, 7, 410, 77]])


def recorded(memory: str, predictions: int, tokens: int = 12) -> tuple[Any, Trace]:
    model = hotset.load(reference.path(), memory=memory, dtype=torch.float32, device="cpu", prefetch="off")
    with model.hotset.trace(lookahead=predictions) as recorder:
        model.generate(IDS, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return model, recorder.finish()


@pytest.mark.parametrize("memory", ["25%", "100%"])  # the caching engine, and the stock model with a tap
def test_predictions_are_what_the_next_routers_say_of_the_same_input(memory: str) -> None:
    inputs: list[tuple[int, Any]] = []
    plain = Routers.predict

    def spy(self: Routers, layer: int, hidden: Any, distances: int, width: int) -> Any:
        said = plain(self, layer, hidden, distances, width)
        inputs.append((layer, said.cpu().numpy().copy()))
        return said

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Routers, "predict", spy)
        model, trace = recorded(memory, 2)
    assert trace.predictions is not None
    assert trace.predictions.shape == (trace.tokens, 8, 2, 16)
    assert (trace.predictions[:, 0] == NONE).all()  # nothing comes before the first layer
    assert (trace.predictions[:, 1, 1] == NONE).all()
    row = 0
    for layer, said in inputs:
        rows = slice(row, row + len(said))
        for distance in range(min(2, 7 - layer)):
            assert (trace.predictions[rows, layer + 1 + distance, distance] == said[:, distance]).all()
        row += len(said) if layer == 7 else 0
    assert row == trace.tokens
    assert model.hotset.engine.stats.routers is None  # nobody pays for it after the recording
    model.hotset.close()


def test_without_the_wish_nothing_is_predicted() -> None:
    model, trace = recorded("25%", 0, 3)
    model.hotset.close()
    assert trace.predictions is None


def test_a_recording_judges_the_gate_forecast(tmp_path: Path) -> None:
    model, trace = recorded("25%", 3, 40)
    model.hotset.close()
    trace.save(tmp_path / "t.safetensors")
    found = evaluate(Trace.load(tmp_path / "t.safetensors"), ["gate", "previous"], (1,), 0.3)
    recall = {score.forecast: score.recall or 0.0 for score in found.scores}
    assert recall[parse("gate").spec] > recall[parse("previous").spec] + 0.2


@pytest.mark.parametrize("distances", [-1, 4])
def test_distances_out_of_reach_are_refused(distances: int) -> None:
    model = hotset.load(reference.path(), memory="25%", device="cpu", prefetch="off")
    with pytest.raises(hotset.HotsetError, match="1 to 3"):
        model.hotset.trace(lookahead=distances)
    assert model.hotset.engine.stats.recorder is None
    model.hotset.close()


def test_a_model_whose_routers_are_hidden_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hotset.load(reference.path(), memory="25%", device="cpu", prefetch="off")
    monkeypatch.setattr("hotset.models.routers.Routers.of", lambda *_: None)
    with pytest.raises(hotset.HotsetError, match="routers"):
        model.hotset.trace(lookahead=1)
    model.hotset.close()


def test_the_name_of_earlier_versions_is_taken_with_a_warning() -> None:
    model = hotset.load(reference.path(), memory="25%", device="cpu", prefetch="off")
    with pytest.warns(DeprecationWarning, match="lookahead"), pytest.raises(hotset.HotsetError, match="1 to 3"):
        model.hotset.trace(guesses=4)
    model.hotset.close()


def test_blocks_without_predictions_leave_a_trace_without() -> None:
    recorder = Recorder(hotset.ModelShape(2, 4, 1))
    ones = np.ones((1, 1), np.float16)
    for number, said in ((1, np.array([[[3]]])), (2, None)):
        for layer in range(2):
            recorder.note(number, layer, np.array([[1]]), ones, np.zeros(1, np.int32), hotset.Phase.DECODE, None, said)
    assert recorder.finish().predictions is None


def test_the_commands_record_predictions(tmp_path: Path) -> None:
    out = tmp_path / "t.safetensors"
    command = ["trace", "record", "--prompts", "reference:it", "--limit", "1", "--max-new-tokens", "2", "-o", str(out)]
    done = CliRunner().invoke(app, [*command, "--record-lookahead", "1"])
    assert done.exit_code == 0, done.output
    predictions = Trace.load(out).predictions
    assert predictions is not None
    assert predictions.shape[2] == 1
    refused = CliRunner().invoke(app, ["run", "-p", "Ciao", "--guesses", "2"])
    assert isinstance(refused.exception, hotset.HotsetError)
    assert "--trace" in str(refused.exception)
