"""Validation of the model configuration."""

import json
import math
from dataclasses import asdict, fields
from typing import Any

import pytest

from lm.common.errors import UserError
from lm.model.config import ModelConfig, MoEConfig, RopeScaling


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
        {"head_dim": 0},
        {"head_dim": 7},  # rope rotates pairs
        {"logit_softcap": -1.0},
        {"norm_placement": "both"},
        {"feed_forward": "gelu"},
    ],
    ids=str,
)
def test_bad_config_is_a_user_error(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        ModelConfig(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"num_experts": 1},
        {"top_k": 9},
        {"top_k": 1},  # a gate divided by itself
        {"d_expert": 0},
        {"num_shared_experts": -1},
        {"affinity": "linear"},
        {"aux_loss_weight": -0.1},
        {"z_loss_weight": math.nan},
        {"bias_update_rate": math.inf},
        {"capacity_factor": 0.0},
        {"num_dense_layers": -1},
    ],
    ids=str,
)
def test_bad_experts_are_a_user_error(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"model\.moe\.{next(iter(options))}"):
        MoEConfig(**options)


def test_experts_must_fit_the_model() -> None:
    with pytest.raises(UserError, match=r"num_dense_layers 4 must be below model\.num_layers 4"):
        ModelConfig(moe=MoEConfig(num_dense_layers=4))
    with pytest.raises(UserError, match=r"d_ff 5 is too small"):
        ModelConfig(d_ff=5, moe=MoEConfig(top_k=8))


def test_a_config_with_experts_is_read_from_json() -> None:
    config = ModelConfig(moe=MoEConfig(num_experts=16, affinity="sigmoid"))
    assert ModelConfig(**json.loads(json.dumps(asdict(config)))) == config


def test_the_identity_of_a_plain_model_is_that_of_before_newer_fields() -> None:
    """Keys of finished outputs contain it."""
    newer = ("head_dim", "moe", "qkv_bias", "rope_scaling")
    assert [*ModelConfig().identity] == [field.name for field in fields(ModelConfig) if field.name not in newer]
    assert ModelConfig(moe=MoEConfig()).identity["moe"]["num_experts"] == 8
    assert ModelConfig(qkv_bias=True).identity["qkv_bias"]
    assert ModelConfig(rope_scaling=RopeScaling()).identity["rope_scaling"]["factor"] == 8.0


def test_rope_scaling_is_read_from_json_and_checked() -> None:
    config = ModelConfig(rope_scaling=RopeScaling("linear", factor=4.0))
    assert ModelConfig(**json.loads(json.dumps(asdict(config)))) == config
    with pytest.raises(UserError, match=r"rope_scaling\.high_freq_factor 1\.0 must be above low_freq_factor 1\.0"):
        RopeScaling(high_freq_factor=1.0)
    with pytest.raises(UserError, match=r"rope_scaling\.factor is 0\.5"):
        RopeScaling(factor=0.5)
    with pytest.raises(UserError, match="leave it out with"):
        ModelConfig(rope_scaling=RopeScaling(), position_encoding="none")
