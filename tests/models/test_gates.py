"""The routers of the layers ahead: found in every family, and alike what the model itself computes with them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "families"))

import tiny_models as tiny  # noqa: E402

import hotset  # noqa: E402
from hotset.models.gates import Gates  # noqa: E402
from hotset.models.sites import find_sites  # noqa: E402

EXACT = [
    "aria", "deepseek_v2", "deepseek_v3", "dots1", "flex_olmo", "gemma4", "glm4_moe", "granitemoe", "hunyuan_v1_moe",
    "jamba", "lfm2_moe", "minimax", "minimax_m2", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
    "qwen3_next", "qwen3_vl_moe/composite",
]  # fmt: skip
NOT_A_MATRIX = ["longcat_flash", "zaya"]  # it has rows for what is no expert; it is a small network
CORRECTED = ["deepseek_v3", "dots1", "glm4_moe", "lfm2_moe", "minimax_m2", "nemotron_h"]


def known(families: list[str]) -> list[str]:
    """Those that the installed transformers has."""
    return [name for name in families if name in tiny.families()]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def gates_of(model: Any) -> Gates:
    gates = Gates.of(model, find_sites(model))
    assert gates is not None
    return gates


def routed(name: str, model: Any) -> dict[int, tuple[Any, list[set[int]]]]:
    """Of each layer that ran: what its experts were given, and who was chosen for each token."""
    seen: dict[int, tuple[Any, list[set[int]]]] = {}
    for layer, site in enumerate(find_sites(model)):

        def forward(hidden: Any, index: Any, weights: Any, layer: int = layer, site: Any = site) -> Any:
            seen[layer] = hidden.clone(), [set(row) for row in index.tolist()]
            return site.stock(hidden, index, weights)

        assert site.stock is not None
        site.install(forward)
    tiny.logits(model, tiny.inputs(name, model))
    return seen


def agreement(gates: Gates, seen: dict[int, tuple[Any, list[set[int]]]]) -> float:
    """For how many tokens a layer's own router, given its own input, names exactly those that were chosen."""
    same = []
    for layer, (hidden, chosen) in seen.items():
        # A guess for the layer itself: by gates that have one more layer before all others.
        shifted = Gates([gates.matrices[0], *gates.matrices], [None, *gates.biases], [None, *gates.offsets])
        said = shifted.guess(layer, hidden, 1, len(chosen[0]))[:, 0].tolist()
        same += [set(row) == right for row, right in zip(said, chosen, strict=True)]
    return float(np.mean(same))


@pytest.mark.parametrize("name", known(EXACT))
def test_with_a_layers_own_input_its_router_names_what_was_chosen(name: str) -> None:
    model = tiny.make(name)
    gates, sites = gates_of(model), find_sites(model)
    assert len(gates.matrices) == len(gates.biases) == len(sites) > 1
    assert [len(matrix) for matrix in gates.matrices] == [site.experts for site in sites]
    assert all((bias is not None) == (name in CORRECTED) for bias in gates.biases)
    seen = routed(name, model)
    assert seen
    assert agreement(gates, seen) == 1.0
    if len(seen) > 1:  # with the input of a layer before, it does not: this test could fail
        wrong = {layer: (seen[layer - 1][0], seen[layer][1]) for layer in list(seen)[1:]}
        assert agreement(gates, wrong) < 1.0


def test_corrections_of_scores_matter() -> None:
    model = tiny.make("glm4_moe")
    gates = gates_of(model)
    assert agreement(Gates(gates.matrices, [None] * len(gates.biases)), routed("glm4_moe", model)) < 1.0


@pytest.mark.parametrize("name", known(NOT_A_MATRIX))
def test_a_router_that_is_no_matrix_of_experts_is_left_alone(name: str) -> None:
    model = tiny.make(name)
    assert Gates.of(model, find_sites(model)) is None


def test_guesses_are_those_of_the_routers_ahead_and_nothing_past_the_last() -> None:
    random = torch.Generator().manual_seed(0)
    matrices = [torch.randn(6, 5, generator=random) for _ in range(3)]
    hidden = torch.randn(4, 5, generator=random)
    said = Gates(matrices, [None] * 3).guess(0, hidden, 3, 2)
    assert said.shape == (4, 3, 2)
    for token in range(4):
        for target in (1, 2):
            scores = (matrices[target] @ hidden[token]).tolist()
            best = sorted(range(6), key=lambda expert: -scores[expert])[:2]
            assert said[token, target - 1].tolist() == best
    assert (said[:, 2] == -1).all()
    assert (Gates(matrices, [None] * 3).guess(2, hidden, 1, 2) == -1).all()


def test_a_correction_is_added_after_the_scores_are_squashed() -> None:
    matrix, hidden = torch.tensor([[8.0], [4.0], [-1.0]]), torch.ones(1, 1)
    plain, corrected = (Gates([matrix] * 2, [bias] * 2) for bias in (None, torch.tensor([0.0, 0.1, 0.0])))
    assert plain.guess(0, hidden, 1, 3).tolist() == [[[0, 1, 2]]]
    assert corrected.guess(0, hidden, 1, 3).tolist() == [[[1, 0, 2]]]  # 0.9997, 1.0820, 0.2689


def test_no_more_are_named_than_there_are_experts() -> None:
    gates = Gates([torch.eye(3)] * 2, [None] * 2)
    said = gates.guess(0, torch.tensor([[1.0, 3.0, 2.0]]), 1, 16)
    assert [expert for expert in said[0, 0].tolist() if expert >= 0] == [1, 2, 0]


def test_the_input_may_be_of_another_type_than_the_router() -> None:
    gates = Gates([torch.eye(3)] * 2, [None] * 2)
    assert gates.guess(0, torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.bfloat16), 1, 2).tolist() == [[[1, 2]]]


def decoded(name: str, model: Any) -> Any:
    """What a prompt and three more tokens give, one at a time."""
    given = tiny.inputs(name, model)
    (key, ids), found, cache = next(iter(given.items())), [], None
    with tiny.quiet(), torch.no_grad():
        for piece in (ids, ids[:, :1], ids[:, 1:2], ids[:, 2:3]):
            out = model(**{key: piece}, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits if getattr(out, "logits", None) is not None else out.last_hidden_state)
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"num_experts_per_tok": 6}),  # twice as many are more than there are
        ("deepseek_v3", {}),
        ("gpt_oss", {}),
        ("longcat_flash", {}),
        ("muse_spark", {}),  # its experts see a projection of the router's input
    ],
)
def test_a_model_that_guesses_computes_what_it_does_without(name: str, changes: dict[str, Any]) -> None:
    if name not in tiny.families():
        pytest.skip("the installed transformers does not have it")
    model = hotset.attach(tiny.make(name, **changes), memory="50%", prefetch="off")
    expected = decoded(name, model)
    model = hotset.attach(hotset.detach(model), memory="50%", prefetch="auto")
    try:
        assert torch.equal(decoded(name, model), expected)
        assert model.hotset.stats()["prefetch"]["forecast"] in (("gate",) if name in EXACT else ("gate", "transition"))
    finally:
        model.hotset.close()


@pytest.mark.parametrize("name", known(["gpt_oss"]))
def test_other_biases_are_part_of_the_choice(name: str) -> None:
    model = tiny.make(name)
    assert agreement(gates_of(model), routed(name, model)) == 1.0
