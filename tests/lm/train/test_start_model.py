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
        {"moe": MoEConfig(4, 2, d_expert=8, bias_update_rate=0.01, z_loss_weight=0.1, capacity_factor=2.0)},
    ],
)
def test_positions_and_the_balance_of_experts_may_differ(stated: dict[str, Any]) -> None:
    assert continued_config(START, stated) == replace(START, **stated)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("d_model", 24),
        ("moe", None),
        ("moe", MoEConfig(4, 2, d_expert=8)),  # without a bias
        ("moe", MoEConfig(4, 3, d_expert=8, bias_update_rate=0.001)),
        ("moe", MoEConfig(4, 2, d_expert=8, bias_update_rate=0.001, affinity="sigmoid")),
    ],
)
def test_what_the_weights_depend_on_may_not(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"model\.{name} .* conflicts with train\.init_from"):
        continued_config(START, {name: value})


def test_experts_of_a_dense_model_are_refused() -> None:
    with pytest.raises(UserError, match=r"model\.moe .* conflicts with train\.init_from"):
        continued_config(replace(START, moe=None), {"moe": MoEConfig()})
