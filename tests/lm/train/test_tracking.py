"""Experiment trackers: wandb, trackio, tensorboard."""

import math
import sys
from pathlib import Path

import pytest

from lm.common.errors import UserError
from tests.helpers.recorder import Recorder
from tests.helpers.training import read_rows, small_trainer


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_modules_get_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, module := Recorder(name))
    small_trainer(tmp_path / "run", trackers=[name], log_interval=1).run()
    settings, *logged, last = module.calls
    assert settings["project"] == "textmill" and settings["name"] == "run"
    assert settings["config"]["train"]["steps"] == 20 and settings["config"]["model"]["d_model"] == 32
    assert last == "finished"
    rows = [{"step": step, **metrics} for step, metrics in logged]
    assert [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows] == read_rows(tmp_path / "run")


def test_tensorboard_gets_every_row(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard")
    small_trainer(tmp_path, trackers=["tensorboard"]).run()
    board = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    rows = [row for row in read_rows(tmp_path) if "loss" in row]
    assert [event.step for event in board.Scalars("loss")] == [row["step"] for row in rows]
    assert [event.value for event in board.Scalars("loss")] == pytest.approx([row["loss"] for row in rows])
    assert "valid_loss" in board.Tags()["scalars"]


def test_a_tracker_that_is_not_installed_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"execution\.trackers names wandb.*pip install wandb"):
        small_trainer(tmp_path, trackers=["wandb"]).run()


def test_a_tracker_that_does_not_start_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", module := Recorder("wandb"))
    monkeypatch.setattr(module, "init", lambda **settings: 1 / 0)
    with pytest.raises(UserError, match=r"execution\.trackers names wandb, which does not start: division"):
        small_trainer(tmp_path, trackers=["wandb"]).run()


@pytest.mark.parametrize("fails", ["log", "finish"])
def test_a_tracker_that_fails_later_does_not_stop_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", module := Recorder("wandb"))
    monkeypatch.setattr(module, fails, lambda *args, **kwargs: 1 / 0)
    assert small_trainer(tmp_path, trackers=["wandb"]).run()["steps"] == 20
    assert caplog.text.count("wandb failed and gets no more metrics") == 1


def test_a_tensorboard_that_fails_later_does_not_stop_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="needs tensorboard", exc_type=ImportError)
    monkeypatch.setattr(tensorboard.SummaryWriter, "add_scalar", lambda *arguments: 1 / 0)
    assert small_trainer(tmp_path, trackers=["tensorboard"]).run()["steps"] == 20
    assert caplog.text.count("tensorboard failed and gets no more metrics: division by zero") == 1


def test_trackers_are_finished_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", module := Recorder("wandb"))
    trainer = small_trainer(tmp_path, trackers=["wandb"])
    loss_sum = trainer.loss_sum
    trainer.loss_sum = lambda micro_batch: loss_sum(micro_batch) * math.nan
    with pytest.raises(UserError, match="diverged"):
        trainer.run()
    assert module.calls[-1] == "finished"
