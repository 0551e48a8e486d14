"""The average of the last weights: what it holds, when it is the result, and its resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.checkpoint.training_checkpoint import load_model
from lm.train.checkpoints import AVERAGE_NAME
from lm.train.trainer import Trainer
from tests.helpers.training import MODEL, read_rows, small_trainer, weights_equal
from tests.lm.train.test_resume import start_and_kill

OPTIONS: dict[str, Any] = {"average_tail": 0.5, "checkpoint_interval": 1, "keep_checkpoints": 20}


def weights_of(trainer: Trainer, name: str) -> dict[str, torch.Tensor]:
    return load_model(trainer.out / name).state_dict()


def set_validation(monkeypatch: pytest.MonkeyPatch, trainer: Trainer, of_average: float) -> None:
    """Give the average one loss and each step the loss 1."""
    average = trainer.average
    swaps: list[None] = []
    assert average
    swap = average._swap
    monkeypatch.setattr(average, "_swap", lambda: swaps.append(swap()))

    def validation_loss(model: Any, sequences: int | None = None) -> float:
        return of_average if len(swaps) % 2 else 1.0

    monkeypatch.setattr(trainer.objective, "validation_loss", validation_loss)


def test_it_is_the_mean_of_the_last_steps(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, **OPTIONS)
    trainer.run()
    steps = [weights_of(trainer, f"step-{step:07}") for step in range(11, 21)]
    for name, mean in weights_of(trainer, AVERAGE_NAME).items():
        torch.testing.assert_close(mean, torch.stack([weights[name] for weights in steps]).mean(0))
    assert all(torch.equal(x, steps[-1][name]) for name, x in trainer.model.state_dict().items())


@pytest.mark.parametrize(("of_average", "best"), [(0.5, "average"), (1.5, "step-0000004")])
def test_it_is_the_result_if_its_loss_is_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_average: float, best: str
) -> None:
    trainer = small_trainer(tmp_path, **OPTIONS)
    set_validation(monkeypatch, trainer, of_average)
    result = trainer.run()
    assert result["best"] == best and result["last"] == "step-0000020"
    assert result["valid_loss"] == (0.5 if best == "average" else 1.0)
    assert json.loads((tmp_path / "training.json").read_text()) == result


@pytest.mark.parametrize("last", [8, 13, 19, 20])
def test_a_resumed_training_has_the_same_average(tmp_path: Path, last: int) -> None:
    options: dict[str, Any] = {"average_tail": 0.5, "optimizer": "muon"}
    whole = small_trainer(tmp_path / "whole", **options)
    result = whole.run()
    start_and_kill(small_trainer(tmp_path / "killed", **options), last)
    again = small_trainer(tmp_path / "killed", **options)
    assert again.resume(tmp_path / "killed")
    assert again.run() == result
    assert weights_equal(again.model, whole.model)
    for name in ("model.safetensors", "checkpoint.json"):
        files = (trainer.out / AVERAGE_NAME / name for trainer in (whole, again))
        assert len({file.read_bytes() for file in files}) == 1
    assert read_rows(again.out) == read_rows(whole.out)


def test_a_tail_that_is_shorter_than_a_step_has_no_average(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, average_tail=0.01, model=MODEL)
    assert trainer.average is None
    assert trainer.run()["best"].startswith("step-")
    assert not (tmp_path / AVERAGE_NAME).exists()


def test_a_training_that_ends_before_the_tail_has_no_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = small_trainer(tmp_path, average_tail=0.2, patience=1)
    monkeypatch.setattr(trainer.objective, "validation_loss", lambda *_: 1.0)
    assert trainer.run()["steps"] == 8
    assert not (tmp_path / AVERAGE_NAME).exists()
