"""Validation of TrainConfig and its learning rate schedule."""

import math
import subprocess
import sys
from typing import Any

import pytest

from lm.common.errors import UserError
from lm.train.config import TrainConfig
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
