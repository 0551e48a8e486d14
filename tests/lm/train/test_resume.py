"""Resumed trainings: bit for bit equal to uninterrupted ones."""

import json
import logging
import math
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest

import lm.checkpoint.training_checkpoint
import lm.train.checkpoints
from lm.checkpoint.training_checkpoint import newest_checkpoint, read_description, save_training, step_directories
from lm.common.errors import Stopped, UserError
from lm.files.checksum import file_checksum
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM
from lm.train.pretraining import Pretraining
from lm.train.tracking import read_metrics
from lm.train.trainer import Trainer
from tests.helpers.training import MODEL, read_rows, small_data, small_trainer, weights_equal


class Killed(Exception):
    """Simulates the end of the process."""


def killed_after(last: int) -> Callable[[int], None]:
    def progress(step: int) -> None:
        if step == last:
            raise Killed

    return progress


def set_best_step(monkeypatch: pytest.MonkeyPatch, trainer: Trainer, step: int) -> None:
    def validation_loss(model: TransformerLM, sequences: int | None = None) -> float:
        return 0.5 if trainer.step == step else 1.0

    monkeypatch.setattr(trainer.objective, "validation_loss", validation_loss)


def start_and_kill(trainer: Trainer, last: int) -> None:
    with pytest.raises(Killed):
        trainer.run(killed_after(last))


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "normuon", "soap_muon"])
@pytest.mark.parametrize("last", [12, 14])
def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, finished: Trainer, optimizer: str, last: int) -> None:
    """From an off-schedule best checkpoint (12), and with rows after the checkpoint (14)."""
    uninterrupted = finished
    if optimizer != "adamw":
        uninterrupted = small_trainer(tmp_path / "uninterrupted", optimizer=optimizer)
        uninterrupted.run()
    start_and_kill(small_trainer(tmp_path / "first", optimizer=optimizer), last)
    with (tmp_path / "first" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 15, "lo')  # a crash cuts a line off
    second = small_trainer(tmp_path / "second", optimizer=optimizer)
    assert second.resume(tmp_path / "first")
    assert 10 <= second.step <= last
    result = second.run()
    assert weights_equal(second.model, uninterrupted.model)
    assert read_rows(second.out) == read_rows(uninterrupted.out)
    assert read_rows(second.out, "samples.jsonl") == read_rows(uninterrupted.out, "samples.jsonl")
    assert result == json.loads((uninterrupted.out / "training.json").read_text())


def test_killed_between_row_and_checkpoint_keeps_each_row_once(
    tmp_path: Path, finished: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = small_trainer(tmp_path / "first", checkpoint_interval=4)

    def save_and_die(directory: Path, *rest: Any) -> None:
        save_training(directory, *rest)
        if directory.name == "step-0000012":
            raise Killed

    monkeypatch.setattr(lm.train.checkpoints, "save_training", save_and_die)
    with pytest.raises(Killed):
        first.run()
    monkeypatch.undo()
    second = small_trainer(tmp_path / "second")
    assert second.resume(tmp_path / "first")
    assert second.step == 12
    second.run()
    assert read_rows(second.out) == read_rows(finished.out)
    assert read_rows(second.out, "samples.jsonl") == read_rows(finished.out, "samples.jsonl")


def test_resumes_twice(tmp_path: Path, finished: Trainer) -> None:
    for name, last in (("1", 7), ("2", 13)):
        trainer = small_trainer(tmp_path / name)
        if name == "2":
            assert trainer.resume(tmp_path / "1")
        start_and_kill(trainer, last)
    shutil.rmtree(tmp_path / "1")
    third = small_trainer(tmp_path / "3")
    assert third.resume(tmp_path / "2")
    third.run()
    assert weights_equal(third.model, finished.model)
    assert read_rows(third.out) == read_rows(finished.out)
    seconds = [row["seconds"] for row in read_metrics(third.out / "metrics.jsonl")]
    assert seconds == sorted(seconds), "an interruption does not start the clock again"


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_resume_hashes_each_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_moved: bool) -> None:
    start_and_kill(small_trainer(tmp_path, keep_checkpoints=2), 12)
    hashed: list[str] = []

    def checksum(file: IO[bytes]) -> str:
        hashed.append(file.name)
        return file_checksum(file)

    monkeypatch.setattr(lm.checkpoint.training_checkpoint, "file_checksum", checksum)
    assert small_trainer(tmp_path / "new" if is_moved else tmp_path).resume(tmp_path)
    checkpoints = step_directories(tmp_path)
    files = [str(path) for directory in checkpoints for path in directory.iterdir() if path.suffix != ".json"]
    assert len(checkpoints) > 1 and sorted(hashed) == sorted(files)


def test_nothing_to_resume(tmp_path: Path, finished: Trainer) -> None:
    trainer = small_trainer(tmp_path / "out")
    assert not trainer.resume(tmp_path / "not there")
    start_and_kill(small_trainer(tmp_path / "early"), 3)
    assert not trainer.resume(tmp_path / "early"), "no checkpoint was saved"
    assert trainer.step == 0
    assert not (trainer.out / "metrics.jsonl").exists()
    trainer.run()
    assert weights_equal(trainer.model, finished.model)


def test_damaged_newest_checkpoint_falls_back(tmp_path: Path, finished: Trainer) -> None:
    first = small_trainer(tmp_path / "first")
    start_and_kill(first, 16)
    newest = newest_checkpoint(first.out)
    assert newest is not None
    weights = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    before = newest_checkpoint(first.out)
    assert before is not None and before < newest
    second = small_trainer(tmp_path / "second")
    assert second.resume(first.out)
    assert second.step == int(before.name[5:])
    second.run()
    assert weights_equal(second.model, finished.model)
    assert read_rows(second.out) == read_rows(finished.out)


def test_a_stopped_and_resumed_training_leaves_the_same_checkpoints(tmp_path: Path, finished: Trainer) -> None:
    """The off-schedule checkpoint of step 18, saved on the stop, is deleted."""
    first, stopping = small_trainer(tmp_path / "first"), threading.Event()
    with pytest.raises(Stopped):
        first.run(lambda step: stopping.set() if step == 17 else None, stopping)
    second = small_trainer(tmp_path / "second")
    assert second.resume(first.out) and second.step == 18
    second.run()
    descriptions, expected = (
        {path.name: read_description(path) for path in out.glob("step-*")} for out in (second.out, finished.out)
    )
    assert descriptions == expected


def test_resume_with_another_optimizer_is_a_user_error(tmp_path: Path) -> None:
    start_and_kill(small_trainer(tmp_path / "first"), 6)
    with pytest.raises(UserError, match="optimizer"):
        small_trainer(tmp_path / "second", optimizer="muon").resume(tmp_path / "first")


def test_stop_saves_and_the_training_resumes(tmp_path: Path, finished: Trainer) -> None:
    first, stopping = small_trainer(tmp_path / "first"), threading.Event()
    with pytest.raises(Stopped, match=r"stopped after step 8 and saved in .*step-0000008"):
        first.run(lambda step: stopping.set() if step == 7 else None, stopping)
    second = small_trainer(tmp_path / "second")
    assert second.resume(first.out) and second.step == 8
    second.run()
    assert weights_equal(second.model, finished.model)
    assert read_rows(second.out) == read_rows(finished.out)


def test_a_stop_during_a_step_ends_with_that_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, stopping = small_trainer(tmp_path), threading.Event()
    micro_batches = trainer.objective.micro_batches

    def load(step: int) -> Any:  # as long as a rollout
        if step == 7:
            stopping.set()
        return micro_batches(step)

    monkeypatch.setattr(trainer.objective, "micro_batches", load)
    monkeypatch.setattr(trainer.objective, "is_prefetchable", False)
    with pytest.raises(Stopped, match="stopped after step 8 "):
        trainer.run(stop_event=stopping)


def test_resumes_in_its_own_directory(tmp_path: Path, finished: Trainer) -> None:
    start_and_kill(small_trainer(tmp_path), 13)
    second = small_trainer(tmp_path)
    assert second.resume(tmp_path) and second.step == 12
    second.run()
    assert weights_equal(second.model, finished.model)
    assert read_rows(tmp_path) == read_rows(finished.out)
    assert read_rows(tmp_path, "samples.jsonl") == read_rows(finished.out, "samples.jsonl")


def test_resumes_with_more_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small_trainer(tmp_path, steps=10).run()
    longer = small_trainer(tmp_path, steps=12, max_lr=5e-3, weight_decay=0.5)
    with caplog.at_level(logging.WARNING, "lm.train"):
        assert longer.resume(tmp_path) and longer.step == 10
    assert "another value of max_lr, weight_decay" in caplog.text and "steps" not in caplog.text
    assert longer.optimizers[0].param_groups[0]["weight_decay"] == 0.5
    assert longer.run()["steps"] == 12


def test_an_attempt_without_a_checkpoint_leaves_no_rows(tmp_path: Path, finished: Trainer) -> None:
    start_and_kill(small_trainer(tmp_path), 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    again = small_trainer(tmp_path)
    assert not again.resume(tmp_path)
    again.run()
    assert read_rows(tmp_path) == read_rows(finished.out)


def test_early_stopping_survives_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 2.0, 2.5, 2.6, 2.7, 2.8])
    monkeypatch.setattr(Pretraining, "validation_loss", lambda self, model, sequences=None: next(losses))
    settings: dict[str, Any] = {"patience": 2, "eval_interval": 3, "checkpoint_interval": 1}
    start_and_kill(small_trainer(tmp_path, **settings), 11)  # after one evaluation without a better loss
    second = small_trainer(tmp_path, **settings)
    assert second.resume(tmp_path) and second.evaluations_without_improvement == 1
    start_and_kill(second, 12)
    third = small_trainer(tmp_path, **settings)
    assert third.resume(tmp_path) and third.evaluations_without_improvement == 2
    assert third.run()["steps"] == 12


@pytest.mark.parametrize("in_place", [True, False])
def test_checkpoints_after_a_damaged_best_one_are_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    """Otherwise another checkpoint would become the best."""

    def trainer(name: str) -> Trainer:
        made = small_trainer(tmp_path / name, keep_checkpoints=4)
        set_best_step(monkeypatch, made, 8)
        return made

    uninterrupted = trainer("uninterrupted")
    uninterrupted.run()
    start_and_kill(trainer("first"), 16)
    saved = sorted(path.name for path in (tmp_path / "first").glob("step-*"))
    assert "step-0000008" in saved and saved[0] < "step-0000008" < saved[-1]
    (tmp_path / "first" / "step-0000008" / "model.safetensors").write_bytes(b"x")
    second = trainer("first" if in_place else "second")
    assert second.resume(tmp_path / "first")
    assert second.step < 8
    assert second.run()["best"] == "step-0000008"
    assert weights_equal(second.model, uninterrupted.model)
    assert read_rows(second.out) == read_rows(uninterrupted.out)
    assert sorted(path.name for path in second.out.glob("step-*")) == sorted(
        path.name for path in uninterrupted.out.glob("step-*")
    )


def test_a_checkpoint_of_another_version_is_a_user_error(tmp_path: Path) -> None:
    first = small_trainer(tmp_path)
    save_training(tmp_path / "step-0000003", first.model, first.optimizers, 3, {"best": {"step": 3}, "stale": 0})
    with pytest.raises(UserError, match="step-0000003 was not saved by this version"):
        first.resume(tmp_path)


def test_a_damaged_checkpoint_is_not_counted_in_keep_checkpoints(tmp_path: Path) -> None:
    start_and_kill(small_trainer(tmp_path, keep_checkpoints=2, sample_prompts=[]), 16)
    (tmp_path / "step-0000016" / "model.safetensors").write_bytes(b"")
    second = small_trainer(tmp_path, keep_checkpoints=1, sample_prompts=[], checkpoint_interval=1)
    assert second.resume(tmp_path)
    start_and_kill(second, second.step + 1)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.name == f"step-{second.step:07d}"


def test_skipped_steps_are_counted_after_a_resume(tmp_path: Path) -> None:
    first, stopping = small_trainer(tmp_path), threading.Event()
    loss_sum = first.loss_sum
    first.loss_sum = lambda micro_batch: loss_sum(micro_batch) * (math.nan if first.step in (3, 7) else 1.0)
    with pytest.raises(Stopped):
        first.run(lambda step: stopping.set() if step == 7 else None, stopping)
    second = small_trainer(tmp_path)
    assert second.resume(tmp_path)
    assert (second.step, second.skipping.skipped, second.skipping.consecutive) == (8, 2, 1)
    assert second.run()["skipped_steps"] == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": replace(MODEL, rope_theta=5.0)}, "model rope_theta 10000.0, and this run has 5.0"),
        ({"digests": {"tokenizer": "t2", "shards": "s1"}}, "data tokenizer t1, and this run has t2"),
        ({"digests": {"tokenizer": "t1", "shards": "s2"}}, "data shards s1, and this run has s2"),
    ],
)
def test_resume_with_another_model_or_data_is_a_user_error(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    def trainer(name: str, model: ModelConfig = MODEL, digests: dict[str, str] | None = None) -> Trainer:
        data = small_data()
        data.digests = digests or {"tokenizer": "t1", "shards": "s1"}
        return small_trainer(tmp_path / name, data, model)

    start_and_kill(trainer("first"), 6)
    assert trainer("same").resume(tmp_path / "first")
    with pytest.raises(UserError, match=named):
        trainer("other", **change).resume(tmp_path / "first")


@pytest.mark.parametrize("has_replacement", [True, False])
def test_a_checkpoint_that_was_moved_aside_is_restored(tmp_path: Path, has_replacement: bool) -> None:
    """A process killed between two renames leaves the checkpoint under a temporary name."""
    start_and_kill(small_trainer(tmp_path, keep_checkpoints=1, sample_prompts=[]), 16)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    aside = tmp_path / f".{newest.name}.12345.old"
    if has_replacement:
        shutil.copytree(newest, aside)
    else:
        newest.rename(aside)
    second = small_trainer(tmp_path, sample_prompts=[])
    assert not aside.exists()
    assert second.resume(tmp_path) and second.step == 16


def test_best_survives_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = small_trainer(tmp_path / "first", keep_checkpoints=1)
    set_best_step(monkeypatch, first, 4)
    start_and_kill(first, 16)
    second = small_trainer(tmp_path / "second", keep_checkpoints=1)
    set_best_step(monkeypatch, second, 4)
    assert second.resume(first.out)
    shutil.rmtree(first.out)
    assert second.run()["best"] == "step-0000004"
    assert read_description(second.out / "step-0000004") is not None
