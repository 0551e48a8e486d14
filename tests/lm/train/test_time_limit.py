"""A training that its time limits: its steps, its learning rate, and its clock after an interruption."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lm.common.errors import Stopped
from lm.train.trainer import Trainer
from tests.helpers.training import read_rows, small_trainer, weights_equal


def set_step_seconds(monkeypatch: pytest.MonkeyPatch, trainer: Trainer, seconds: float) -> None:
    """Give the trainer a clock on which each step takes so many seconds, and an evaluation as many again."""
    clock = SimpleNamespace(now=100.0)
    train_step, evaluate = trainer.train_step, trainer._evaluate

    def count(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            clock.now += seconds
            return function(*arguments)

        return counted

    monkeypatch.setattr(trainer, "train_step", count(train_step))
    monkeypatch.setattr(trainer, "_evaluate", count(evaluate))
    monkeypatch.setattr("lm.train.schedule_progress.time", SimpleNamespace(perf_counter=lambda: clock.now))


@pytest.mark.parametrize(("seconds", "steps"), [(1.0, 20), (2.0, 16), (5.0, 5), (100.0, 1)])
def test_a_time_limit_ends_the_training_and_its_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, steps: int
) -> None:
    interval = 8 if steps > 5 else 5
    trainer = small_trainer(tmp_path, max_seconds=36.0, eval_interval=interval, log_interval=1)
    set_step_seconds(monkeypatch, trainer, seconds)
    result = trainer.run()
    assert result["steps"] == steps and result["last"] == f"step-{steps:07d}"
    rows = read_rows(tmp_path)
    assert "valid_loss" in rows[-1], "the last step is evaluated"
    over, evaluated, clock = [0.0], [], 0.0  # steps of the schedule; numbers of evaluated steps
    for step in range(1, steps + 1):
        clock += seconds
        now = max(step, 20 * clock / 36)
        if now // interval > over[-1] // interval or now >= 20:
            evaluated.append(step)
            clock += seconds
        over.append(max(step, 20 * clock / 36))
    assert (over == [*range(21)]) == (seconds == 1.0), "time is left when the steps are made"
    assert [row["lr"] for row in rows] == [trainer.config.lr(1 + int(number)) for number in over[:-1]]
    assert [row["step"] for row in rows if "valid_loss" in row] == evaluated


def test_all_processes_end_by_the_clock_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = small_trainer(tmp_path, max_seconds=36.0)
    monkeypatch.setattr("lm.train.schedule_progress.broadcast_from_rank0", lambda seconds: 36.0)
    assert trainer.run()["steps"] == 1


@pytest.mark.parametrize("stop", [5, 8], ids=["between evaluations", "after an evaluation"])
def test_the_time_before_an_interruption_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    limits: dict[str, Any] = {"max_seconds": 36.0, "eval_interval": 8, "log_interval": 1}
    whole = small_trainer(tmp_path / "whole", **limits)
    set_step_seconds(monkeypatch, whole, 2.0)
    whole.run()
    first = small_trainer(tmp_path / "first", **limits)
    set_step_seconds(monkeypatch, first, 2.0)
    stopping = threading.Event()
    with pytest.raises(Stopped):
        first.run(lambda step: stopping.set() if step == stop - 1 else None, stopping)
    second = small_trainer(tmp_path / "second", **limits)
    set_step_seconds(monkeypatch, second, 2.0)
    assert second.resume(tmp_path / "first") and second.step == stop
    second.run()
    assert read_rows(second.out) == read_rows(whole.out)
    assert weights_equal(second.model, whole.model)
