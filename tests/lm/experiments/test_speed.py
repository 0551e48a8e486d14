"""The measurement of a training's speed."""

from typing import Any

import pytest

from lm.common.execution import Execution
from lm.experiments import speed
from lm.model.config import ModelConfig
from lm.train.config import TrainConfig


def test_the_share_of_a_process_has_the_flops_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """They decide whether it is compiled."""
    configs: list[TrainConfig] = []

    def capture(config: TrainConfig, *arguments: Any) -> None:
        configs.append(config)
        raise InterruptedError

    monkeypatch.setattr(speed, "make_trainer", capture)
    model = ModelConfig(300, 16, d_model=16, num_layers=1, num_heads=2, d_ff=32)
    with pytest.raises(InterruptedError):
        speed.measure_speed(model, TrainConfig(batch_size=8), 1.0, Execution(processes=2, device="cpu"))
    (share,) = configs
    assert (share.batch_size, share.batch_size * share.steps) == (4, 8 * TrainConfig().steps)
