"""Validation of the model configuration."""

import json
import math
from dataclasses import asdict, fields
from typing import Any

import pytest

from lm.common.errors import UserError
from lm.model.config import ModelConfig, MoEConfig, Multipliers, RopeScaling


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
        {"rotary_fraction": 0.0},
        {"rotary_fraction": 0.01},  # no pair
        {"rotary_fraction": 0.1},  # of 32: 3 dimensions
        {"rotary_fraction": 0.5, "position_encoding": "none"},
        {"global_rope": False, "position_encoding": "none"},
        {"global_interval": 1},
        {"global_interval": 5, "global_rope": False},  # of 4 blocks
        {"global_interval": 2},  # nothing differs
        {"global_rope": False},
        {"local_rope_theta": 10.0},
        {"local_rope_theta": 10.0, "global_interval": 2, "position_encoding": "none"},
        {"sliding_window": 0},
        {"attention_softcap": -1.0},
        {"qk_norm_per_head": False},
        {"feed_forward": "geglu", "moe": MoEConfig()},
        {"rope_theta": 1.0, "rope_scaling": RopeScaling("yarn")},
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
        {"shared_gate": True},  # of no expert
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
    names = [field.name for field in fields(ModelConfig)]
    oldest = [name for name in names[: names.index("moe")] if name not in ("head_dim", "qkv_bias")]
    assert [*ModelConfig().identity] == oldest
    assert ModelConfig(moe=MoEConfig()).identity["moe"]["num_experts"] == 8
    assert "shared_gate" not in ModelConfig(moe=MoEConfig()).identity["moe"]
    assert ModelConfig(moe=MoEConfig(num_shared_experts=1, shared_gate=True)).identity["moe"]["shared_gate"]
    assert ModelConfig(qkv_bias=True).identity["qkv_bias"]
    scaling = ModelConfig(rope_scaling=RopeScaling()).identity["rope_scaling"]
    assert [*scaling] == ["kind", "factor", "low_freq_factor", "high_freq_factor", "original_context_length"]
    assert ModelConfig(rope_scaling=RopeScaling("yarn", beta_fast=3.0)).identity["rope_scaling"]["beta_fast"] == 3.0


def test_rope_scaling_is_read_from_json_and_checked() -> None:
    config = ModelConfig(rope_scaling=RopeScaling("linear", factor=4.0))
    assert ModelConfig(**json.loads(json.dumps(asdict(config)))) == config
    with pytest.raises(UserError, match=r"rope_scaling\.high_freq_factor 1\.0 must be above low_freq_factor 1\.0"):
        RopeScaling(high_freq_factor=1.0)
    with pytest.raises(UserError, match=r"rope_scaling\.factor is 0\.5"):
        RopeScaling(factor=0.5)
    longrope = ModelConfig(d_model=16, num_heads=4, rope_scaling=RopeScaling("longrope", divisors=[1, 2.5]))
    assert ModelConfig(**json.loads(json.dumps(asdict(longrope)))) == longrope and hash(longrope)
    with pytest.raises(UserError, match=r"rope_scaling\.beta_fast 1\.0 must be above beta_slow 1\.0"):
        RopeScaling("yarn", beta_fast=1.0)
    with pytest.raises(UserError, match="divisors are for the kind longrope"):
        RopeScaling("longrope")
    with pytest.raises(UserError, match="leave it out with"):
        ModelConfig(rope_scaling=RopeScaling(), position_encoding="none")


def test_multipliers_are_read_from_json_and_checked() -> None:
    config = ModelConfig(multipliers=Multipliers(embedding=12.0, attention=0.5))
    assert ModelConfig(**json.loads(json.dumps(asdict(config)))) == config
    assert config.identity["multipliers"]["embedding"] == 12.0 and ModelConfig().factors == Multipliers()
    with pytest.raises(UserError, match=r"model\.multipliers\.residual is 0\.0; it must be above 0"):
        Multipliers(residual=0.0)


def test_options_that_differ_from_a_llama_are_named() -> None:
    config = ModelConfig(d_model=64, sliding_window=8, qk_norm=True, context_length=16)
    assert config.unusual_options({"d_model", "context_length"}) == ["qk_norm", "sliding_window"]
    assert not config.unusual_options({"d_model", "context_length", "qk_norm", "sliding_window"})


def test_blocks_are_global_or_local() -> None:
    config = ModelConfig(num_layers=5, sliding_window=8, global_interval=2, global_rope=False, context_length=16)
    assert [config.window(layer) for layer in range(5)] == [8, None, 8, None, 8]
    assert [config.has_rope(layer) for layer in range(5)] == [True, False, True, False, True]
    assert ModelConfig(sliding_window=8, context_length=8).window(0) is None, "as long as the context"
