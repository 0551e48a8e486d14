"""Training that stops and goes on: a resumed run equals an uninterrupted one, bit for bit."""

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lm.trainer
from lm.checkpoint import newest_checkpoint, read_description, save_training
from lm.errors import UserError
from lm.model import ModelConfig
from lm.trainer import Interrupted, Trainer
from tests.training import MODEL, ROOT, make, make_data, rows_of, weights_equal


class Killed(Exception):
    """Stands for the end of the process."""


def killed_after(last: int) -> Callable[[int], None]:
    def progress(step: int) -> None:
        if step == last:
            raise Killed

    return progress


def start_and_kill(trainer: Trainer, last: int) -> None:
    with pytest.raises(Killed):
        trainer.run(killed_after(last))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("last", [12, 14])
def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, finished: Trainer, optimizer: str, last: int) -> None:
    """Through a best checkpoint beside the interval's (12), and with rows past the checkpoint (14)."""
    straight = finished
    if optimizer == "muon":
        straight = make(tmp_path / "straight", optimizer=optimizer)
        straight.run()
    start_and_kill(make(tmp_path / "first", optimizer=optimizer), last)
    with (tmp_path / "first" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 15, "lo')  # what a crash leaves
    second = make(tmp_path / "second", optimizer=optimizer)
    assert second.resume(tmp_path / "first")
    assert 10 <= second.step <= last
    result = second.run()
    assert weights_equal(second.model, straight.model)
    assert rows_of(second.out) == rows_of(straight.out)
    assert rows_of(second.out, "samples.jsonl") == rows_of(straight.out, "samples.jsonl")
    assert result == json.loads((straight.out / "training.json").read_text())


def test_killed_between_row_and_checkpoint_loses_and_doubles_no_row(
    tmp_path: Path, finished: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(tmp_path / "first", checkpoint_interval=4)

    def save_and_die(directory: Path, *rest: Any) -> None:
        save_training(directory, *rest)
        if directory.name == "step-0000012":
            raise Killed

    monkeypatch.setattr(lm.trainer, "save_training", save_and_die)
    with pytest.raises(Killed):
        first.run()
    monkeypatch.undo()
    second = make(tmp_path / "second")
    assert second.resume(tmp_path / "first")
    assert second.step == 12
    second.run()
    assert rows_of(second.out) == rows_of(finished.out)
    assert rows_of(second.out, "samples.jsonl") == rows_of(finished.out, "samples.jsonl")


def test_resumes_twice(tmp_path: Path, finished: Trainer) -> None:
    for name, last in (("1", 7), ("2", 13)):
        trainer = make(tmp_path / name)
        if name == "2":
            assert trainer.resume(tmp_path / "1")
        start_and_kill(trainer, last)
    shutil.rmtree(tmp_path / "1")
    third = make(tmp_path / "3")
    assert third.resume(tmp_path / "2")
    third.run()
    assert weights_equal(third.model, finished.model)
    assert rows_of(third.out) == rows_of(finished.out)


def test_nothing_to_resume(tmp_path: Path, finished: Trainer) -> None:
    trainer = make(tmp_path / "out")
    assert not trainer.resume(tmp_path / "not there")
    start_and_kill(make(tmp_path / "early"), 3)
    assert not trainer.resume(tmp_path / "early"), "no checkpoint was reached"
    assert trainer.step == 0
    assert not (trainer.out / "metrics.jsonl").exists()
    trainer.run()
    assert weights_equal(trainer.model, finished.model)


def test_damaged_newest_checkpoint_falls_back(tmp_path: Path, finished: Trainer) -> None:
    first = make(tmp_path / "first")
    start_and_kill(first, 16)
    newest = newest_checkpoint(first.out)
    assert newest is not None
    weights = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    before = newest_checkpoint(first.out)
    assert before is not None and before < newest
    second = make(tmp_path / "second")
    assert second.resume(first.out)
    assert second.step == int(before.name[5:])
    second.run()
    assert weights_equal(second.model, finished.model)
    assert rows_of(second.out) == rows_of(finished.out)


def test_a_training_that_was_stopped_leaves_the_files_of_one_that_was_not(tmp_path: Path, finished: Trainer) -> None:
    """The checkpoint that stopping saves, of step 18, is none of those that stay."""
    first, stopping = make(tmp_path / "first"), threading.Event()
    with pytest.raises(Interrupted):
        first.run(lambda step: stopping.set() if step == 17 else None, stopping)
    second = make(tmp_path / "second")
    assert second.resume(first.out) and second.step == 18
    second.run()
    left, wanted = (
        {path.name: read_description(path) for path in out.glob("step-*")} for out in (second.out, finished.out)
    )
    assert left == wanted


def test_resume_of_another_optimizer_is_a_user_error(tmp_path: Path) -> None:
    start_and_kill(make(tmp_path / "first"), 6)
    with pytest.raises(UserError, match="optimizer"):
        make(tmp_path / "second", optimizer="muon").resume(tmp_path / "first")


def test_asked_to_stop_it_saves_and_goes_on(tmp_path: Path, finished: Trainer) -> None:
    first, stopping = make(tmp_path / "first"), threading.Event()
    with pytest.raises(Interrupted, match=r"stopped after step 8 and saved in .*step-0000008"):
        first.run(lambda step: stopping.set() if step == 7 else None, stopping)
    second = make(tmp_path / "second")
    assert second.resume(first.out) and second.step == 8
    second.run()
    assert weights_equal(second.model, finished.model)
    assert rows_of(second.out) == rows_of(finished.out)


def test_goes_on_in_its_own_directory(tmp_path: Path, finished: Trainer) -> None:
    start_and_kill(make(tmp_path), 13)
    second = make(tmp_path)
    assert second.resume(tmp_path) and second.step == 12
    second.run()
    assert weights_equal(second.model, finished.model)
    assert rows_of(tmp_path) == rows_of(finished.out)
    assert rows_of(tmp_path, "samples.jsonl") == rows_of(finished.out, "samples.jsonl")


def test_more_steps_go_on_from_the_last_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, steps=10).run()
    longer = make(tmp_path, steps=12, max_lr=5e-3, weight_decay=0.5)
    with caplog.at_level(logging.WARNING, "lm.trainer"):
        assert longer.resume(tmp_path) and longer.step == 10
    assert "another max_lr, weight_decay" in caplog.text and "steps" not in caplog.text
    assert longer.optimizers[0].param_groups[0]["weight_decay"] == 0.5, "as it says"
    assert longer.run()["steps"] == 12


def test_an_attempt_without_a_checkpoint_leaves_no_rows(tmp_path: Path, finished: Trainer) -> None:
    start_and_kill(make(tmp_path), 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    again = make(tmp_path)
    assert not again.resume(tmp_path)
    again.run()
    assert rows_of(tmp_path) == rows_of(finished.out)


def test_what_ended_early_stays_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 2.0, 2.5, 2.6, 2.7, 2.8])
    monkeypatch.setattr(Trainer, "evaluate", lambda self, sequences=None: next(losses))
    settings: dict[str, Any] = {"patience": 2, "eval_interval": 3, "checkpoint_interval": 1}
    start_and_kill(make(tmp_path, **settings), 11)  # one validation without a better loss is counted
    second = make(tmp_path, **settings)
    assert second.resume(tmp_path) and second.stale == 1
    start_and_kill(second, 12)
    third = make(tmp_path, **settings)
    assert third.resume(tmp_path) and third.stale == 2
    assert third.run()["steps"] == 12


@pytest.mark.parametrize("in_place", [True, False])
def test_where_the_best_is_damaged_what_came_after_it_is_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    """Else another would be the best in the end."""

    def trainer(name: str) -> Trainer:
        found = make(tmp_path / name, keep_checkpoints=4)
        monkeypatch.setattr(found, "evaluate", lambda sequences=None: 0.5 if found.step == 8 else 1.0)
        return found

    straight = trainer("straight")
    straight.run()
    start_and_kill(trainer("first"), 16)
    saved = sorted(path.name for path in (tmp_path / "first").glob("step-*"))
    assert "step-0000008" in saved and saved[0] < "step-0000008" < saved[-1]
    (tmp_path / "first" / "step-0000008" / "model.safetensors").write_bytes(b"x")
    second = trainer("first" if in_place else "second")
    assert second.resume(tmp_path / "first")
    assert second.step < 8
    assert second.run()["best"] == "step-0000008"
    assert weights_equal(second.model, straight.model)
    assert rows_of(second.out) == rows_of(straight.out)
    assert sorted(path.name for path in second.out.glob("step-*")) == sorted(
        path.name for path in straight.out.glob("step-*")
    )


def test_a_checkpoint_of_another_make_is_named(tmp_path: Path) -> None:
    first = make(tmp_path)
    save_training(tmp_path / "step-0000003", first.model, first.optimizers, 3, {"best": 3})
    with pytest.raises(UserError, match="step-0000003 is no checkpoint of a training"):
        first.resume(tmp_path)


def test_a_damaged_checkpoint_makes_room(tmp_path: Path) -> None:
    start_and_kill(make(tmp_path, keep_checkpoints=2, sample_prompts=[]), 16)
    (tmp_path / "step-0000016" / "model.safetensors").write_bytes(b"")
    second = make(tmp_path, keep_checkpoints=1, sample_prompts=[], checkpoint_interval=1)
    assert second.resume(tmp_path)
    start_and_kill(second, second.step + 1)
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.name == f"step-{second.step:07d}"


def test_skipped_steps_are_counted_on(tmp_path: Path) -> None:
    first, stopping = make(tmp_path), threading.Event()
    loss = first.loss
    first.loss = lambda x, y: loss(x, y) * (math.nan if first.step in (3, 7) else 1.0)
    with pytest.raises(Interrupted):
        first.run(lambda step: stopping.set() if step == 7 else None, stopping)
    second = make(tmp_path)
    assert second.resume(tmp_path) and (second.step, second.skipped, second.skipped_in_a_row) == (8, 2, 1)
    assert second.run()["skipped_steps"] == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": replace(MODEL, rope_theta=5.0)}, "model rope_theta 10000.0, and this run has 5.0"),
        ({"digests": {"tokenizer": "t2", "shards": "s1"}}, "data tokenizer t1, and this run has t2"),
        ({"digests": {"tokenizer": "t1", "shards": "s2"}}, "data shards s1, and this run has s2"),
    ],
)
def test_resume_of_something_else_is_a_user_error(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    def trainer(name: str, model: ModelConfig = MODEL, digests: dict[str, str] | None = None) -> Trainer:
        data = make_data()
        data.digests = digests or {"tokenizer": "t1", "shards": "s1"}
        return make(tmp_path / name, data, model)

    start_and_kill(trainer("first"), 6)
    assert trainer("same").resume(tmp_path / "first")
    with pytest.raises(UserError, match=named):
        trainer("other", **change).resume(tmp_path / "first")


SCRIPT = """
import sys, time
from pathlib import Path
from tests.training import make

def progress(step):
    print(step, flush=True)
    if step == 19:
        time.sleep(600)  # long before this it is killed

make(Path(sys.argv[1])).run(progress)
"""


def test_killed_process_resumes_to_the_same_weights(tmp_path: Path, finished: Trainer) -> None:
    """SIGKILL at a moment of the operating system's choosing."""
    out = tmp_path / "first"
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(out)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if int(line) == 9:
                break
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    second = make(tmp_path / "second")
    assert second.resume(out)
    assert 5 <= second.step < 20
    second.run()
    assert weights_equal(second.model, finished.model)
    assert rows_of(second.out) == rows_of(finished.out)


def test_best_survives_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make(tmp_path / "first", keep_checkpoints=1)
    monkeypatch.setattr(first, "evaluate", lambda sequences=None: 0.5 if first.step == 4 else 1.0)
    start_and_kill(first, 16)
    second = make(tmp_path / "second", keep_checkpoints=1)
    monkeypatch.setattr(second, "evaluate", lambda sequences=None: 1.0)
    assert second.resume(first.out)
    shutil.rmtree(first.out)
    assert second.run()["best"] == "step-0000004"
    assert read_description(second.out / "step-0000004") is not None
