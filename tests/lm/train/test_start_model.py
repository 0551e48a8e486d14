"""Which options of a model may differ in a training that continues from it."""

from dataclasses import replace
from typing import Any

import pytest

from lm.common.errors import UserError
from lm.model.config import ModelConfig
from lm.model.moe_config import MoEConfig
from lm.train.start_model import continued_config

START = ModelConfig(300, 64, moe=MoEConfig(4, 2, d_expert=8, bias_update_rate=0.001, aux_loss_weight=0))


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"context_length": 128, "rope_theta": 5e5},
        {"d_model": START.d_model, "moe": START.moe},
    ],
)
def test_positions_may_differ(stated: dict[str, Any]) -> None:
    assert continued_config(START, stated) == replace(START, **stated)


@pytest.mark.parametrize(
    "stated",
    [
        {"bias_update_rate": 0.01, "z_loss_weight": 0.1, "capacity_factor": 2.0},
        {"aux_loss_weight": 0.003},
        {"num_experts": 4, "d_expert": 8},
    ],
)
def test_of_the_experts_only_the_stated_fields_change(stated: dict[str, Any]) -> None:
    continued = continued_config(START, {"moe": MoEConfig(**stated)})
    assert continued.moe is not None and START.moe is not None
    assert continued == replace(START, moe=replace(START.moe, **stated))


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        ({"d_model": 24}, "d_model"),
        ({"moe": MoEConfig(num_experts=5)}, "moe.num_experts"),
        ({"moe": MoEConfig(4, 3)}, "moe.top_k"),
        ({"moe": MoEConfig(affinity="sigmoid")}, "moe.affinity"),
    ],
)
def test_what_the_weights_depend_on_may_not(stated: dict[str, Any], named: str) -> None:
    with pytest.raises(
        UserError, match=rf"model\.{named} .* conflicts with train\.init_from.* leave model\.{named} out"
    ):
        continued_config(START, stated)


def test_experts_without_a_bias_get_none() -> None:
    start = replace(START, moe=MoEConfig(4, 2, d_expert=8))
    with pytest.raises(UserError, match=r"model\.moe\.bias_update_rate 0\.001 conflicts"):
        continued_config(start, {"moe": MoEConfig(bias_update_rate=0.001)})


def test_experts_of_a_dense_model_are_refused() -> None:
    with pytest.raises(UserError, match=r"model\.moe .* conflicts with train\.init_from"):
        continued_config(replace(START, moe=None), {"moe": MoEConfig()})
