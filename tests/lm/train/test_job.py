"""Trainings from job files: stopped or killed at any time, the same command resumes to the same result."""

import errno
import fcntl
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from lm.distributed.launch import INTERRUPTED_EXIT_CODE
from lm.train.__main__ import main
from lm.train.pretraining import Job
from lm.train.trainer import Trainer
from tasks.runtime.training_process import has_same_inputs
from tests.helpers.limits import wait_for
from tests.helpers.slow_training import SECONDS_VARIABLE
from tests.helpers.training import MODEL, ROOT, read_rows, start_and_kill, train_here, write_job

KILLS = int(os.environ.get("TEXTMILL_KILLS", "2"))  # each takes some seconds


def weights_of(job: Path, step: int) -> bytes:
    return (job.parent / f"step-{step:07d}" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_killed_again_and_again(tmp_path: Path) -> None:
    """SIGKILL at random times; metrics and weights equal those of an uninterrupted run."""
    steps = 50 * KILLS  # so many that the training is not over before the last kill
    whole, job = (write_job(tmp_path / name, steps=steps, checkpoint_interval=7) for name in ("whole", "killed"))
    train_here(Job.read(whole))
    start_and_kill("tests.helpers.slow_training", job, KILLS)
    assert main([str(job)]) == 0
    assert read_rows(job.parent) == read_rows(whole.parent)
    assert weights_of(job, steps) == weights_of(whole, steps)


@pytest.mark.slow
def test_five_thousand_shards_within_256_more_open_files(tmp_path: Path) -> None:
    """An 80 GB corpus has that many. Metrics and weights equal those of one shard with the same tokens."""
    whole, cut = (write_job(tmp_path / name, sample_prompts=[], checkpoint_interval=20) for name in ("whole", "cut"))
    tokens = np.random.default_rng(1).integers(97, 107, 10_000).astype("<u2")
    tokens.tofile(tmp_path / "whole" / "train.bin")
    shards = tmp_path / "cut" / "shards"
    shards.mkdir()
    for number, piece in enumerate(np.split(tokens, 5_000)):
        piece.tofile(shards / f"{number}.bin")
    job = Job.read(cut)
    job.train = [f"../shards/{number}.bin" for number in range(5_000)]
    job.write(cut)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = max(int(path.name) for path in Path("/dev/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 256, limits[1]))
    try:
        assert main([str(cut)]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    train_here(Job.read(whole))
    assert read_rows(cut.parent) == read_rows(whole.parent)
    assert weights_of(cut, 20) == weights_of(whole, 20)


class Ended(BaseException):
    """In place of the end of the process."""


@pytest.fixture
def signals_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A function that sends signals before some steps of trainings in this process, which SIGTERM does not end."""

    def end(*_: Any) -> None:
        raise Ended

    def send(number: int, *steps: int) -> None:
        train_step = Trainer.train_step

        def receive_and_train(trainer: Trainer, *arguments: Any) -> Any:
            if trainer.step in steps:
                signal.raise_signal(number)
            return train_step(trainer, *arguments)

        monkeypatch.setattr(Trainer, "train_step", receive_and_train)

    before = signal.signal(signal.SIGTERM, end)
    yield send
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_a_signal_ends_a_job_and_the_same_command_resumes(
    tmp_path: Path, signals_at: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """First SIGHUP in a process whose terminal is gone: nothing can be printed any more. Then SIGTERM."""
    uninterrupted, job = (write_job(tmp_path / name, steps=50) for name in ("uninterrupted", "job"))
    train_here(Job.read(uninterrupted))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.slow_training", str(job)],
        cwd=ROOT,
        env=os.environ | {SECONDS_VARIABLE: "0.1"},
        stderr=subprocess.PIPE,
    )
    wait_for((job.parent / "metrics.jsonl").exists, 60, "metrics.jsonl")
    assert process.stderr is not None
    process.stderr.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == INTERRUPTED_EXIT_CODE
    signals_at(signal.SIGTERM, 48)
    assert main([str(job)]) == INTERRUPTED_EXIT_CODE
    assert capsys.readouterr().err.splitlines()[-1].startswith("lm.train: The training was stopped after step 49 ")
    assert main([str(job)]) == 0
    assert read_rows(job.parent) == read_rows(uninterrupted.parent)
    assert weights_of(job, 50) == weights_of(uninterrupted, 50)


@pytest.mark.parametrize("has_torchrun", [True, False])
def test_a_second_signal_has_its_usual_effect_at_once_except_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals_at: Callable[..., None], has_torchrun: bool
) -> None:
    """By default it ends the process."""
    job, save = write_job(tmp_path, checkpoint_interval=100), Trainer.save

    def receive_and_save(trainer: Trainer) -> None:
        signal.raise_signal(signal.SIGTERM)
        save(trainer)

    if has_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "some")
    monkeypatch.setattr(Trainer, "save", receive_and_save)
    signals_at(signal.SIGTERM, 3)
    with nullcontext() if has_torchrun else pytest.raises(Ended):
        assert main([str(job)]) == INTERRUPTED_EXIT_CODE
    assert (job.parent / "step-0000004").exists() == has_torchrun


def test_a_full_disk_is_no_mistake_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("lm.train.checkpoints.save_training", Mock(side_effect=error))
    assert main([str(write_job(tmp_path))]) == 74
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"lm\.train: The checkpoint of step 5 cannot be saved .* No space left", last)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not the job of a training"),
        ("{}", "is not the job of a training"),
        ('{"config": 1}', "is not the job of a training"),
    ],
)
def test_a_bad_job_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "job.json").write_text(text)
    assert main([str(tmp_path / "job.json")]) == 2
    assert message in capsys.readouterr().err


def test_job_round_trip(tmp_path: Path) -> None:
    job = Job.read(write_job(tmp_path))
    assert asdict(job.model) == asdict(MODEL) and job.config.steps == 20
    assert Path(job.out).resolve() == (tmp_path / "out").resolve()
    assert Path(job.train[0]).resolve() == (tmp_path / "train.bin").resolve()


def test_checkpoints_are_not_resumed_after_the_data_was_rebuilt(tmp_path: Path) -> None:
    """Data is rebuilt because it was damaged, perhaps while the earlier attempt read it."""
    path = write_job(tmp_path)
    job = Job.read(path)
    assert has_same_inputs(path.parent, job)
    assert not has_same_inputs(path.parent, replace(job, train=[str(tmp_path / "other-attempt" / "train.bin")]))
    with path.open() as file:  # as `python -m lm.train` does
        fcntl.flock(file, fcntl.LOCK_SH)
        assert not has_same_inputs(path.parent, job), "a training is running there"
    assert has_same_inputs(path.parent, job)
    path.unlink()
    assert not has_same_inputs(path.parent, job)
