"""Checkpoints that are written while the training goes on."""

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import lm.train.checkpoint_writer
import lm.train.checkpoints
from lm.checkpoint.training_checkpoint import newest_checkpoint, read_description, save_training
from lm.checkpoint.training_snapshot import Buffers, take_snapshot
from lm.common.errors import Stopped, StorageError
from tests.helpers.checkpoints import FILE_NAMES, make_training, train_steps
from tests.helpers.training import read_rows, small_trainer, weights_equal


class Slow:
    """Writes checkpoints when it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write, self.threads = threading.Event(), set[threading.Thread]()
        monkeypatch.setattr(lm.train.checkpoints, "save_training", self.save)

    def save(self, *parts: Any) -> None:
        self.threads.add(threading.current_thread())
        if threading.current_thread() is not threading.main_thread():
            assert self.may_write.wait(60)
        save_training(*parts)


def file_bytes(directory: Path) -> list[bytes]:
    return [(directory / name).read_bytes() for name in FILE_NAMES]


@pytest.mark.parametrize("count", [1, 3])
def test_a_copy_is_saved_with_the_bytes_of_its_moment(tmp_path: Path, count: int) -> None:
    """Though the training has gone on, and though the memory held an earlier copy."""
    model, optimizers = make_training(0)
    buffers: Buffers = {}
    for step in range(count):
        train_steps(model, optimizers, range(step, step + 1))
        copy = take_snapshot(model, optimizers).copy(buffers)
    places = {place: buffer.data_ptr() for place, buffer in buffers.items()}
    save_training(tmp_path / "then", model, optimizers, count, {})
    train_steps(model, optimizers, range(count, count + 2))
    save_training(tmp_path / "later", model, optimizers, count, {}, snapshot=copy)
    assert file_bytes(tmp_path / "later") == file_bytes(tmp_path / "then")
    take_snapshot(model, optimizers).copy(buffers)
    assert {place: buffer.data_ptr() for place, buffer in buffers.items()} == places


def test_the_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    trainer = small_trainer(tmp_path / "slow", eval_interval=20)
    seen: dict[int, Path | None] = {}

    def look(step: int) -> None:
        seen[step] = newest_checkpoint(trainer.out)
        if step == 7:
            slow.may_write.set()

    result = trainer.run(look)
    assert seen[7] is None and threading.main_thread() not in slow.threads
    monkeypatch.undo()
    expected = small_trainer(tmp_path / "plain", eval_interval=20)
    assert expected.run() == result
    assert weights_equal(trainer.model, expected.model) and read_rows(trainer.out) == read_rows(expected.out)
    for step in (15, 20):
        assert file_bytes(trainer.out / f"step-{step:07}") == file_bytes(expected.out / f"step-{step:07}")


@pytest.mark.parametrize("reason", ["little memory", "no memory"])
def test_without_memory_for_a_copy_the_training_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    slow = Slow(monkeypatch)
    trainer = small_trainer(tmp_path, steps=5)
    if reason == "little memory":
        monkeypatch.setattr(lm.train.checkpoint_writer, "free_memory", lambda: 1000)
    else:

        def fail(*arguments: Any, **options: Any) -> torch.Tensor:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        monkeypatch.setattr("lm.checkpoint.training_snapshot.torch.empty", fail)
    trainer.save()
    assert slow.threads == {threading.main_thread()} and newest_checkpoint(tmp_path)


def test_a_checkpoint_that_cannot_be_written_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next checkpoint; the one before it is left."""

    def fail(directory: Path, *rest: Any) -> None:
        if directory.name == "step-0000010":
            raise OSError("No space left on device")
        save_training(directory, *rest)

    monkeypatch.setattr(lm.train.checkpoints, "save_training", fail)
    steps: list[int] = []
    with pytest.raises(StorageError, match=r"step 10 cannot be saved .* resumes from .*step-0000005"):
        small_trainer(tmp_path, eval_interval=20).run(steps.append)
    assert 10 <= steps[-1] <= 15 and not (tmp_path / "training.json").exists()
    monkeypatch.undo()
    again = small_trainer(tmp_path, eval_interval=20)
    assert again.resume(tmp_path) and again.step == 5
    assert again.run()["steps"] == 20
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 3, 6, 9, 12, 15, 18, 20]


def test_an_error_of_the_training_is_not_replaced_by_that_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*parts: Any) -> None:
        raise OSError("No space left on device")

    def stop(step: int) -> None:
        if step == 6:
            raise ZeroDivisionError

    monkeypatch.setattr(lm.train.checkpoints, "save_training", fail)
    with caplog.at_level(logging.ERROR, "lm.train"), pytest.raises(ZeroDivisionError):
        small_trainer(tmp_path, eval_interval=20).run(stop)
    assert "The checkpoint of step 5 cannot be saved" in caplog.text


def test_a_training_that_is_stopped_has_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names a directory that is there."""
    slow, stopping = Slow(monkeypatch), threading.Event()
    slow.may_write.set()
    trainer = small_trainer(tmp_path, eval_interval=20)
    with pytest.raises(Stopped, match=r"saved in .*step-0000008"):
        trainer.run(lambda step: stopping.set() if step == 7 else None, stopping)
    assert read_description(tmp_path / "step-0000008")
