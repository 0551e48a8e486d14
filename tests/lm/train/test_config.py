"""Validation of TrainConfig, its learning rate schedule, and options of a model that a training continues from."""

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from lm.common.errors import UserError
from lm.model.config import ModelConfig, MoEConfig
from lm.train.config import TrainConfig, continued_config
from tests.helpers.training import ROOT


@pytest.mark.parametrize(
    "bad",
    [
        {"steps": 0},
        {"batch_size": 0},
        {"batch_size": 6, "gradient_accumulation_steps": 4},
        {"patience": 0},
        {"decay_fraction": 1.5},
        {"schedule": "linear"},
        {"data_order": "sorted"},
        {"eval_interval": 0},
        {"eval_sequences": 0},
        {"checkpoint_interval": -1},
        {"keep_checkpoints": 0},
        {"min_lr": -1e-4},
        {"min_lr": 2.0},
        {"min_lr": math.nan},
        {"max_lr": math.nan},
        {"warmup_steps": -1},
        {"warmup_steps": 100, "steps": 100},
        {"warmup_steps": 60, "steps": 100, "schedule": "wsd", "decay_fraction": 0.41},
        {"weight_decay": -0.1},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": math.nan},
        {"sample_tokens": -1},
        {"optimizer": "adam"},
        {"precision": "float16"},
    ],
    ids=str,
)
def test_bad_config_is_a_user_error(bad: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"train.{next(iter(bad))}"):
        TrainConfig(**bad)


@pytest.mark.parametrize(
    "settings",
    [
        {"warmup_steps": 99, "steps": 100},
        {"warmup_steps": 0, "steps": 1},
        {"warmup_steps": 60, "steps": 100, "schedule": "wsd", "decay_fraction": 0.4},
        {"warmup_steps": 0, "steps": 100, "schedule": "wsd", "decay_fraction": 1.0},
    ],
    ids=str,
)
def test_learning_rate_reaches_maximum_and_minimum(settings: dict[str, Any]) -> None:
    config = TrainConfig(**settings)
    assert max(config.lr(step) for step in range(config.steps + 1)) == config.max_lr
    assert config.lr(config.steps) == config.min_lr


def test_a_limit_that_is_not_set_keeps_the_key_of_a_training() -> None:
    assert "max_seconds" not in TrainConfig().identity
    assert TrainConfig(max_seconds=5.0).identity == TrainConfig().identity | {"max_seconds": 5.0}


def test_configs_do_not_import_torch() -> None:
    """The command line imports all configs; torch takes seconds."""
    code = "import sys, lm.common.execution, lm.train.config; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


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
