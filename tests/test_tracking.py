"""Where a training's figures go besides its own files."""

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lm.errors import UserError
from tests.training import make, rows_of


class Recorder(ModuleType):
    """A module of Weights & Biases' shape that remembers what it is told."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.told: list[Any] = []

    def init(self, **settings: Any) -> None:
        self.told.append(settings)

    def log(self, figures: dict[str, Any], step: int) -> None:
        self.told.append((step, figures))

    def finish(self) -> None:
        self.told.append("finished")


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_modules_are_told_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, module := Recorder(name))
    make(tmp_path / "run", trackers=[name], log_interval=1).run()
    settings, *rows, last = module.told
    assert settings["project"] == "textmill" and settings["name"] == "run"
    assert settings["config"]["train"]["steps"] == 20 and settings["config"]["model"]["d_model"] == 32
    assert last == "finished"
    told = [{"step": step, **figures} for step, figures in rows]
    assert [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in told] == rows_of(tmp_path / "run")


def test_tensorboard_gets_every_row(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard")
    make(tmp_path, trackers=["tensorboard"]).run()
    found = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    rows = [row for row in rows_of(tmp_path) if "loss" in row]
    assert [event.step for event in found.Scalars("loss")] == [row["step"] for row in rows]
    assert [event.value for event in found.Scalars("loss")] == pytest.approx([row["loss"] for row in rows])
    assert "valid_loss" in found.Tags()["scalars"]


def test_a_tracker_that_is_not_installed_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"execution\.trackers names wandb.*pip install wandb"):
        make(tmp_path, trackers=["wandb"]).run()


def test_a_tracker_that_does_not_start_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", module := Recorder("wandb"))
    monkeypatch.setattr(module, "init", lambda **settings: 1 / 0)
    with pytest.raises(UserError, match=r"execution\.trackers names wandb, which does not start: division"):
        make(tmp_path, trackers=["wandb"]).run()


@pytest.mark.parametrize("fails", ["log", "finish"])
def test_a_tracker_that_fails_later_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", module := Recorder("wandb"))
    monkeypatch.setattr(module, fails, lambda *figures, **step: 1 / 0)
    assert make(tmp_path, trackers=["wandb"]).run()["steps"] == 20
    assert caplog.text.count("wandb fails and is told no more") == 1


def test_trackers_are_told_of_an_end_by_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", module := Recorder("wandb"))
    trainer = make(tmp_path, trackers=["wandb"])
    trainer.loss = lambda x, y: trainer._plain_loss(x, y) * math.nan
    with pytest.raises(UserError, match="diverged"):
        trainer.run()
    assert module.told[-1] == "finished"
