"""Validation of the model configuration."""

import math
from typing import Any

import pytest

from lm.common.errors import UserError
from lm.model.config import ModelConfig


@pytest.mark.parametrize(
    "options",
    [
        {"vocab_size": 0},
        {"context_length": 0},
        {"d_model": 0},
        {"num_layers": 0},
        {"num_heads": 0},
        {"num_heads": -2},
        {"d_ff": 0},
        {"d_model": 100, "num_heads": 16},  # not a multiple
        {"d_model": 48, "num_heads": 16},  # heads 3 wide; rope rotates pairs
        {"d_model": 50, "num_heads": 16, "position_encoding": "none"},  # not a multiple
        {"rope_theta": 0.0},
        {"rope_theta": -1.0},
        {"rope_theta": math.nan},
        {"norm_eps": -1e-5},
        {"num_kv_heads": 3},  # does not divide 16
        {"logit_softcap": -1.0},
        {"norm_placement": "both"},
        {"feed_forward": "gelu"},
    ],
    ids=str,
)
def test_bad_config_is_a_user_error(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        ModelConfig(**options)
