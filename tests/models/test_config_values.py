"""Values of a config that no checkpoint can mean are refused by their names, and those that only look odd are not."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import tiny_models as tiny

from hotset.errors import ModelError
from hotset.models.find_layers import find_moe_layers
from hotset.models.plausible import refuse_no_numbers

NAMES = {"qwen3_moe": "num_experts_per_tok", "ernie4_5_moe": "moe_k", "gemma4": "top_k_experts"}


@pytest.mark.parametrize(
    "document",
    [
        {"time_step_limit": [0.0, math.inf]},  # as state space models have it
        {"time_step_limit": (0.0, math.inf)},
        {"swiglu_limit": math.inf, "time_step_max": math.inf},
        {"rope_theta": 1e6, "parts": {"eps": 1e-6, "names": ["nan"], "none": None}, "on": True},
    ],
)
def test_bounds_may_be_infinite(document: Any) -> None:
    refuse_no_numbers("config.json", document)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"rms_norm_eps": math.nan}, "rms_norm_eps = nan"),
        ({"rms_norm_eps": -math.inf}, "rms_norm_eps = -inf"),
        ({"text_config": {"rope_parameters": {"rope_theta": math.inf}}}, "rope_theta = inf"),
        ({"swiglu_limit": math.nan}, "swiglu_limit = nan"),
        ({"factors": [1.0, [math.nan]]}, "factors = nan"),
    ],
)
def test_what_is_no_number_is_refused(document: Any, words: str) -> None:
    with pytest.raises(ModelError, match=f"config.json says {re.escape(words)}, which"):
        refuse_no_numbers("config.json", document)


@pytest.mark.parametrize("number", [0, 9])
@pytest.mark.parametrize("name", NAMES)
def test_experts_per_token_are_refused_by_the_name_that_the_family_has(name: str, number: int) -> None:
    changes = {NAMES[name]: number}
    if name == "gemma4":
        changes |= {"enable_moe_block": True, "num_experts": 8}
    with pytest.raises(ModelError, match=f"the config says {NAMES[name]} = {number}, and a layer has 8 experts"):
        find_moe_layers(tiny.make(name, **changes))
