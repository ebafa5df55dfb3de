"""The routers of the layers ahead: found in every family, and alike what the model itself computes with them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_configs  # noqa: E402
import tiny_models as tiny  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import hotset  # noqa: E402
from hotset.models.find_layers import find_moe_layers  # noqa: E402
from hotset.models.routers import Choice, Router, Routers  # noqa: E402

NOT_A_MATRIX = [
    ("zaya", {}),  # a small network
    ("muse_spark", {}),  # experts see a projection of the router's input
    ("muse_spark", {"moe_intermediate_size": 32}),  # which is what the router takes
]
# As in all published models: with more, experts are given a row for each that was chosen.
CHANGES: dict[str, dict[str, Any]] = {"llama4": {"num_experts_per_tok": 1}}
GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "topk_method": "group_limited_greedy"}
CORRECTED = [
    "afmoe", "deepseek_v3", "deepseek_v4", "ernie4_5_moe", "glm4_moe", "inkling", "laguna", "lfm2_moe", "longcat_flash",
    "minimax_m2", "nemotron_h", "step3p7",
]  # fmt: skip

Routed = dict[int, tuple[Any, list[set[int]]]]


def known(families: list[str]) -> list[str]:
    """Those that the installed transformers has."""
    return [name for name in families if name in tiny.families()]


def cases(pairs: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Those whose family the installed transformers has."""
    return [(name, changes) for name, changes in pairs if name in tiny.families()]


def grouped() -> list[str]:
    """The families that choose experts from some groups only."""
    found = []
    for name in tiny.families():
        config = tiny.model_class(name).config_class()
        if "n_group" in tiny_configs.fields_of(type(getattr(config, "text_config", config))):
            found.append(name)
    return found


def uneven(name: str, **changes: Any) -> Any:
    """A tiny model in which everything counts: corrections that decide, and norms that are not all ones."""
    model, random = tiny.make(name, **changes), torch.Generator().manual_seed(5)
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        last = path.rpartition(".")[2]
        if last in ("e_score_correction_bias", "expert_bias", "correction_bias"):
            tensor.data.copy_(0.3 * torch.randn(tensor.shape, generator=random))
        elif tensor.dim() == 1 and (last == "scale" or ("norm" in path and last == "weight")):
            tensor.data.add_(torch.rand(tensor.shape, generator=random) - 0.5)
    return model


def routers_of(model: Any) -> Routers:
    routers = Routers.of(model, find_moe_layers(model))
    assert routers is not None
    return routers


def routed(name: str, model: Any) -> Routed:
    """Of each layer that ran: what its experts were given, and who was chosen for each token."""
    seen: Routed = {}
    for layer, moe_layer in enumerate(find_moe_layers(model)):

        def forward(hidden: Any, index: Any, weights: Any, layer: int = layer, moe_layer: Any = moe_layer) -> Any:
            chosen = [{expert for expert in row if expert < moe_layer.experts} for row in index.tolist()]
            seen[layer] = hidden.clone(), chosen
            return torch.zeros_like(hidden) if moe_layer.stock is None else moe_layer.stock(hidden, index, weights)

        moe_layer.install(forward)
    tiny.logits(model, tiny.inputs(name, model))
    return seen


def agreement(routers: Routers, seen: Routed) -> float:
    """For how many tokens a layer's own router, given its own input, puts first exactly those that were chosen."""
    same = []
    # A prediction for the layer itself: by routers that have one more layer before all others.
    shifted = Routers([None, *routers.routers], [*routers.scales, None])
    for layer, (hidden, chosen) in seen.items():
        if routers.routers[layer] is not None:
            said = shifted.predict(layer, hidden, 1, max(map(len, chosen)))[:, 0].tolist()
            same += [set(row[: len(right)]) == right for row, right in zip(said, chosen, strict=True)]
    return float(np.mean(same))


def without(routers: Routers, **parts: Any) -> Routers:
    """The same routers, but for these parts."""
    return Routers([None if router is None else router._replace(**parts) for router in routers.routers], routers.scales)


@pytest.mark.parametrize("name", [name for name in tiny.families() if name not in dict(NOT_A_MATRIX)])
def test_with_a_layers_own_input_its_router_names_what_was_chosen(name: str) -> None:
    model = uneven(name, **CHANGES.get(name, {}))
    routers, moe_layers = routers_of(model), find_moe_layers(model)
    assert len(routers.routers) == len(routers.scales) == len(moe_layers) > 1
    assert [layer for layer, router in enumerate(routers.routers) if router is None] == [0] * (name == "deepseek_v4")
    seen = routed(name, model)
    assert seen
    assert agreement(routers, seen) == 1.0
    if len(seen) > 1:  # with the input of a layer before, it does not: this test could fail
        wrong = {after: (seen[layer][0], seen[after][1]) for layer, after in pairwise(seen)}
        assert agreement(routers, wrong) < 1.0


@pytest.mark.parametrize("name", grouped())
def test_groups_of_experts_are_kept_to(name: str) -> None:
    config = tiny.model_class(name).config_class()
    fields = tiny_configs.fields_of(type(getattr(config, "text_config", config)))
    model = uneven(name, **{key: value for key, value in GROUPS.items() if key in fields})
    routers, seen = routers_of(model), routed(name, model)
    assert agreement(routers, seen) == 1.0
    free = [None if router is None else router.choice._replace(groups=1) for router in routers.routers]
    ungrouped = [
        router and router._replace(choice=choice) for router, choice in zip(routers.routers, free, strict=True)
    ]
    assert agreement(Routers(ungrouped, routers.scales), seen) < 1.0


@pytest.mark.parametrize("name", known(CORRECTED))
def test_corrections_and_the_scores_they_are_added_to_matter(name: str) -> None:
    model = uneven(name)
    routers, seen = routers_of(model), routed(name, model)
    assert agreement(without(routers, correction=None), seen) < 1.0
    assert agreement(without(routers, choice=Choice()), seen) < 1.0


@pytest.mark.parametrize("name", known(["gpt_oss"]))
def test_other_biases_are_part_of_the_choice(name: str) -> None:
    model = uneven(name)
    routers = routers_of(model)
    for router in routers.routers:
        assert router is not None
        assert router.offset is not None
        router.offset.mul_(5)  # the model's own numbers
    seen = routed(name, model)
    assert agreement(routers, seen) == 1.0
    assert agreement(without(routers, offset=None), seen) < 1.0


@pytest.mark.parametrize("name", known(["gemma4", "diffusion_gemma"]))
def test_the_norm_of_the_experts_is_undone_for_a_router_that_has_its_own(name: str) -> None:
    model = uneven(name)
    routers, seen = routers_of(model), routed(name, model)
    assert agreement(Routers(routers.routers), seen) < 1.0
    assert agreement(routers, seen) == 1.0


@pytest.mark.parametrize("name", known(["gemma4"]))
def test_a_norm_that_drops_a_part_of_the_state_leaves_the_rest_to_predict_by(name: str) -> None:
    model = uneven(name)
    layer = model.get_submodule(find_moe_layers(model)[0].name.rpartition(".")[0])
    layer.pre_feedforward_layernorm_2.weight.data[3] = 0
    (scale, *_), hidden = routers_of(model).scales, torch.ones(1, tiny.HIDDEN)
    assert scale is not None
    assert (hidden * scale)[0, 3] == 0
    assert scale.isfinite().all()


@pytest.mark.parametrize(("name", "changes"), cases(NOT_A_MATRIX))
def test_a_router_that_is_no_matrix_for_what_experts_take_is_left_alone(name: str, changes: dict[str, Any]) -> None:
    model = tiny.make(name, **changes)
    assert Routers.of(model, find_moe_layers(model)) is None


@pytest.mark.parametrize("name", known(["deepseek_v4"]))
def test_a_layer_that_chooses_by_token_is_not_predicted(name: str) -> None:
    model = tiny.make(name, mlp_layer_types=["hash_moe", "hash_moe", "moe"])
    routers, hidden = routers_of(model), torch.randn(3, tiny.HIDDEN)
    assert (routers.predict(0, hidden, 1, 2) == -1).all()
    assert (routers.predict(1, hidden, 1, 2) >= 0).all()
    both = routers.predict(0, hidden, 2, 2)
    assert (both[:, 0] == -1).all()
    assert torch.equal(both[:, 1:], routers.predict(1, hidden, 1, 2))


def test_asking_routers_leaves_random_numbers_as_they_were() -> None:
    model, before = uneven("glm4_moe"), torch.get_rng_state()
    routers_of(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_router_that_cannot_be_asked_is_taken_to_be_like_most(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise TypeError("called in a way that nobody knows")

    model = uneven("glm4_moe")
    seen = routed("glm4_moe", model)
    moe_layer = find_moe_layers(model)[0]
    monkeypatch.setattr(type(model.get_submodule(moe_layer.name.rpartition(".")[0]).gate), "forward", refuse)
    assert agreement(routers_of(model), seen) == 1.0


def plain(matrices: list[Any], **parts: Any) -> Routers:
    return Routers([Router(matrix, len(matrix), **parts) for matrix in matrices])


def test_predictions_are_those_of_the_routers_ahead_and_nothing_past_the_last() -> None:
    random = torch.Generator().manual_seed(0)
    matrices = [torch.randn(6, 5, generator=random) for _ in range(3)]
    hidden = torch.randn(4, 5, generator=random)
    said = plain(matrices).predict(0, hidden, 3, 2)
    assert said.shape == (4, 3, 2)
    for token in range(4):
        for target in (1, 2):
            scores = (matrices[target] @ hidden[token]).tolist()
            best = sorted(range(6), key=lambda expert: -scores[expert])[:2]
            assert said[token, target - 1].tolist() == best
    assert (said[:, 2] == -1).all()
    assert torch.equal(plain(matrices).predict(0, hidden, 1, 2), said[:, :1])
    for distances in (1, 2):
        past = plain(matrices).predict(2, hidden, distances, 2)
        assert past.shape == (4, distances, 2)
        assert past.dtype == said.dtype
        assert (past == -1).all()


def test_a_correction_is_added_after_the_scores_are_squashed() -> None:
    matrix, hidden = torch.tensor([[8.0], [4.0], [-1.0]]), torch.ones(1, 1)
    corrected = plain([matrix] * 2, correction=torch.tensor([0.0, 0.1, 0.0]), choice=Choice(torch.sigmoid))
    assert plain([matrix] * 2).predict(0, hidden, 1, 3).tolist() == [[[0, 1, 2]]]
    assert corrected.predict(0, hidden, 1, 3).tolist() == [[[1, 0, 2]]]  # 0.9997, 1.0820, 0.2689


@pytest.mark.parametrize(("counted", "first"), [(1, [0, 1]), (2, [2, 3])])
def test_the_best_groups_are_those_whose_best_are_best_together(counted: int, first: list[int]) -> None:
    matrix = torch.tensor([[9.0], [1.0], [8.0], [7.0], [2.0], [0.0]])
    routers = plain([matrix] * 2, choice=Choice(None, 3, 1, counted))
    assert routers.predict(0, torch.ones(1, 1), 1, 2).tolist() == [[first]]


def test_rows_past_the_experts_are_never_named() -> None:
    matrix = torch.tensor([[1.0], [2.0], [9.0]])
    assert Routers([Router(matrix, 2)] * 2).predict(0, torch.ones(1, 1), 1, 3).tolist() == [[[1, 0]]]


def test_no_more_are_named_than_there_are_experts() -> None:
    said = plain([torch.eye(3)] * 2).predict(0, torch.tensor([[1.0, 3.0, 2.0]]), 1, 16)
    assert [expert for expert in said[0, 0].tolist() if expert >= 0] == [1, 2, 0]


def test_the_input_may_be_of_another_type_than_the_router() -> None:
    hidden = torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.bfloat16)
    assert plain([torch.eye(3)] * 2).predict(0, hidden, 1, 2).tolist() == [[[1, 2]]]


class Operations(TorchDispatchMode):
    """Notes the operations that compute something; a view costs a device nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_prediction_takes_no_operation_that_it_does_not_need() -> None:
    bias, hidden = torch.tensor([0.0, 0.1, 0.0]), torch.ones(2, 3)
    corrected = plain([torch.eye(3)] * 2, correction=bias, choice=Choice(torch.sigmoid))
    corrected.predict(1, hidden, 1, 2)
    for routers, layer, expected in [
        (plain([torch.eye(3)] * 2), 0, ["mm", "topk"]),
        (corrected, 0, ["mm", "sigmoid", "add", "topk"]),
        (corrected, 1, []),  # past the last layer: said once, then kept
    ]:
        with Operations() as operations:
            routers.predict(layer, hidden, 1, 2)
        assert operations.names == expected


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
        ("gpt_oss", {"intermediate_size": 48}),  # no multiple of a vector's width
        ("longcat_flash", {}),
        ("inkling", {}),
        ("gemma4", {}),
        ("llama4", {}),
        ("muse_spark", {}),  # its experts see a projection of the router's input
    ],
)
def test_a_model_that_predicts_computes_what_it_does_without(name: str, changes: dict[str, Any]) -> None:
    if name not in tiny.families():
        pytest.skip("the installed transformers does not have it")
    model = hotset.attach(tiny.make(name, **changes), memory="50%", prefetch="off")
    expected = decoded(name, model)
    model = hotset.attach(hotset.detach(model), memory="50%", prefetch="auto")
    try:
        assert torch.equal(decoded(name, model), expected)
        by_routers = model.hotset.stats()["prefetch"]["forecast"] == "gate"
        assert by_routers == (name not in dict(NOT_A_MATRIX))
    finally:
        model.hotset.close()
